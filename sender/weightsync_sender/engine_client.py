"""Control calls of one engine over HTTP: each with a deadline of its own, each failure with the remote words.

In: an endpoint, maybe an API key. Out: plain values, or a ``ControlCallError`` that names the call. Knows sglang 0.5.23's
routes and the plugin's; never decides what comes next.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from weightsync_core.endpoints import Endpoint
from weightsync_core.errors import ControlCallError, DeadlineExceeded, DocumentError, EngineRefused, Unreachable, WeightSyncError
from weightsync_core.protocol import (
    ANSWER_KEY,
    DIGEST_ACTION,
    GENERATION_ACTION,
    IDENTITY_ROUTE,
    LEASE_ROUTE,
    NO_TABLE_MARK,
    OWNER_HEADER,
    REVOKE_ACTION,
    TABLE_ACTION,
)
from weightsync_core.tables import Identity, ParameterTable, Placement, Session, parse_stock_table, parse_table
from weightsync_sender.settings import SettingsError

_FLUSH_PAUSE_SECONDS = 0.02


@dataclass(frozen=True)
class Deadline:
    """An absolute moment (monotonic clock) and what it was given for."""

    at: float
    what: str
    seconds: float

    @staticmethod
    def after(seconds: float, what: str) -> Deadline:
        """``seconds`` from now."""
        return Deadline(time.monotonic() + seconds, what, seconds)

    @property
    def left(self) -> float:
        """Seconds left.

        Raises:
            DeadlineExceeded: none.
        """
        left = self.at - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded(f"{self.what} took longer than the {self.seconds:g} s it was given")
        return left


class EngineClient:
    """One engine's control calls. Thread-safe as far as httpx is."""

    def __init__(self, endpoint: Endpoint, api_key: str | None = None) -> None:
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise SettingsError(f"the API key for {endpoint} has characters that no HTTP header may have")
        self.endpoint = endpoint
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # No proxy from the environment: engines are inside the cluster. No connection is kept: sglang closes idle ones after
        # five seconds, and a call that meets that moment would count as an engine that does not answer.
        self._http = httpx.Client(base_url=endpoint.url, headers=headers, trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))
        self.has_lease = True
        """Whether the engine has a lease route, as far as seen."""

    def close(self) -> None:
        """Close connections."""
        self._http.close()

    def server_info(self, deadline: Deadline) -> dict[str, Any]:
        """``/server_info``: the resolved arguments and the version."""
        return self._json("GET", "/server_info", deadline)

    def identity(self, deadline: Deadline) -> dict[str, Any] | None:
        """The plugin's identity route; None where the engine has no plugin (or several tokenizer processes)."""
        try:
            return self._json("GET", IDENTITY_ROUTE, deadline)
        except ControlCallError as error:
            if error.status in (404, 405):
                return None
            raise

    def tables(self, deadline: Deadline) -> list[ParameterTable] | None:
        """Live tables of every rank and role; None where the engine has no plugin.

        Raises:
            DocumentError: tables that break their schema, or ranks that are missing.
        """
        try:
            answer = self._json("POST", "/weights_checker", deadline, {"action": TABLE_ACTION})
        except ControlCallError as error:
            if NO_TABLE_MARK in error.body:
                return None
            raise
        with self._reading("/weights_checker"):
            tables = [
                parse_table(json.loads(text))
                for rank in answer.get("ranks") or []
                for key, text in rank["checksums"].items()
                if key == ANSWER_KEY or key.endswith(f".{ANSWER_KEY}")
            ]
        if not tables:
            raise DocumentError(f"{self.endpoint} answered the table call without a table; is its plugin of this version?")
        return _number_ranks(tables)

    def stock_tables(self, info: Mapping[str, Any], protocol: str, deadline: Deadline) -> list[ParameterTable]:
        """Tables that sglang's own Mooncake seeding publishes, with what is missing made up.

        The identity of the process is its Mooncake session and start time; a draft cannot be told from the target.

        Raises:
            EngineRefused: the engine runs without the seeding flag, or with several replicas or a draft.
        """
        if not info.get("remote_instance_weight_loader_start_seed_via_transfer_engine"):
            raise EngineRefused(
                f"{self.endpoint} publishes no parameter memory: install p2p-weightsync[engine] beside its sglang, or start it with "
                "--remote-instance-weight-loader-start-seed-via-transfer-engine"
            )
        if info.get("speculative_algorithm") or int(info.get("dp_size") or 1) > 1:
            raise EngineRefused(
                f"{self.endpoint} publishes by sglang's own seeding, which keeps one table per tensor-parallel rank and so cannot tell a "
                "draft or a data-parallel replica from the target: install p2p-weightsync[engine] beside its sglang"
            )
        device = "cpu" if info.get("device") == "cpu" else "cuda"
        tables = []
        with self._reading("/remote_instance_transfer_engine_info"):
            size = int(info["tp_size"])
            for rank in range(size):
                answer = self._json("GET", f"/remote_instance_transfer_engine_info?rank={rank}", deadline)
                session, rows = answer["remote_instance_transfer_engine_info"]
                tables.append(
                    parse_stock_table(
                        rows,
                        Placement(rank=rank, tp_rank=rank, tp_size=size, ep_size=int(info.get("ep_size") or 1)),
                        Session(transport="mooncake", memory=device, device=0, address=session, detail=protocol),
                        Identity(sglang=str(info.get("version", ""))),
                        generation=f"{session}@{json.dumps(info.get('startup_time'), sort_keys=True)}",
                    )
                )
        return tables

    def take_lease(self, owner: str, seconds: float, deadline: Deadline, *, renew: bool = False) -> tuple[bool, str]:
        """Take or keep the right to update this engine; (granted, who holds it).

        Granted where there is no lease route, which ``has_lease`` then says.
        """
        try:
            self._json("POST", LEASE_ROUTE, deadline, {"owner": owner, "seconds": seconds, "renew": renew})
        except ControlCallError as error:
            if error.status in (404, 405):
                self.has_lease = False
                return True, ""
            if error.status == 409:
                with self._reading(LEASE_ROUTE):
                    return False, str(json.loads(error.body)["owner"])
            raise
        self._http.headers[OWNER_HEADER] = owner
        return True, owner

    def forget_lease(self) -> None:
        """Make calls in nobody's name again. A new update begins with it; until then a late call still names its old owner."""
        self._http.headers.pop(OWNER_HEADER, None)

    def give_back_lease(self, owner: str, deadline: Deadline) -> None:
        """Give the right back; quiet where there is no lease route."""
        try:
            self._json("DELETE", f"{LEASE_ROUTE}?owner={owner}", deadline)
        except ControlCallError as error:
            if error.status not in (404, 405):
                raise

    def revoke(self, deadline: Deadline) -> None:
        """Have every rank publish over new sessions, so that writes through the old ones land no more."""
        self.check_weights(REVOKE_ACTION, deadline)

    def pause(self, mode: str, deadline: Deadline) -> None:
        """``/pause_generation``."""
        self._json("POST", "/pause_generation", deadline, {"mode": mode})

    def resume(self, deadline: Deadline) -> None:
        """``/continue_generation``."""
        self._json("POST", "/continue_generation", deadline, {})

    def flush_cache(self, deadline: Deadline) -> None:
        """``/flush_cache``, asked again while it answers 400 (requests still run)."""
        pause = _FLUSH_PAUSE_SECONDS
        while True:
            try:
                self._send("POST", "/flush_cache", deadline)
                return
            except ControlCallError as error:
                if error.status != 400:
                    raise
                if deadline.at - time.monotonic() <= pause:
                    raise ControlCallError(
                        f"{self.endpoint}: /flush_cache was refused for {deadline.seconds:g} s, requests still run: {error.body}",
                        call="/flush_cache", status=400, body=error.body,
                    ) from error  # fmt: skip
            time.sleep(pause)
            pause = min(pause * 2, 1.0)

    def begin(self, deadline: Deadline) -> bool:
        """``/begin_weight_update``; False when a session is open already."""
        try:
            self._json("POST", "/begin_weight_update", deadline, {})
        except ControlCallError as error:
            if "already open" in error.body:
                return False
            raise
        return True

    def end(self, deadline: Deadline) -> None:
        """``/end_weight_update``."""
        self._json("POST", "/end_weight_update", deadline, {})

    def set_version(self, version: str, deadline: Deadline) -> None:
        """``/update_weight_version``, without aborting requests."""
        self._json("POST", "/update_weight_version", deadline, {"new_version": version, "abort_all_requests": False})

    def check_weights(self, action: str, deadline: Deadline, skip: list[str] | None = None) -> dict[str, Any]:
        """sglang's ``/weights_checker``."""
        return self._json("POST", "/weights_checker", deadline, {"action": action, "skip_tensor_list": skip})

    def checksums(self, deadline: Deadline) -> list[dict[str, str]]:
        """sglang's checksums of all tensors, one mapping per rank."""
        answer = self.check_weights("checksum", deadline)
        with self._reading("/weights_checker"):
            return [dict(rank["checksums"]) for rank in answer["ranks"]]

    def generations(self, deadline: Deadline) -> set[tuple[str, bool]]:
        """(generation, whether an update is open) of every rank, in one small answer each."""
        answer = self.check_weights(GENERATION_ACTION, deadline)
        with self._reading("/weights_checker"):
            documents = [json.loads(text) for rank in answer["ranks"] for text in rank["checksums"].values()]
            return {(document["generation"], document["open_session"]) for document in documents}

    def digests(self, wanted: Mapping[str, Mapping[str, Any]], deadline: Deadline) -> list[dict[str, str]]:
        """Raw byte digests, one mapping per rank; draft parameters are keyed ``draft.NAME``."""
        answer = self.check_weights(f"{DIGEST_ACTION}:{json.dumps(wanted)}", deadline)
        ranks = []
        with self._reading("/weights_checker"):
            for rank in answer["ranks"]:
                merged = {}
                for key, text in rank["checksums"].items():
                    prefix = key.removesuffix(ANSWER_KEY)
                    merged.update({prefix + name: digest for name, digest in json.loads(text).items()})
                ranks.append(merged)
        return ranks

    @contextlib.contextmanager
    def _reading(self, call: str) -> Iterator[None]:
        """An answer of another form than expected is a DocumentError."""
        try:
            yield
        except WeightSyncError:
            raise
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise DocumentError(f"{self.endpoint}: {call} answered in another form: {type(error).__name__}: {error}") from error

    def _json(self, method: str, path: str, deadline: Deadline, body: Any = None) -> dict[str, Any]:
        response = self._send(method, path, deadline, body)
        try:
            answer = response.json()
        except ValueError as error:
            raise self._failed(path, response.status_code, response.text, "expected JSON") from error
        if not isinstance(answer, dict):
            raise self._failed(path, response.status_code, response.text, "expected a JSON object")
        if answer.get("success") is False:
            raise self._failed(path, response.status_code, response.text, "success is false")
        return answer

    def _send(self, method: str, path: str, deadline: Deadline, body: Any = None) -> httpx.Response:
        left = deadline.left
        try:
            with self._http.stream(method, path, json=body, timeout=httpx.Timeout(left, connect=min(left, 10.0))) as response:
                content = bytearray()
                for block in response.iter_bytes():
                    content += block
                    _ = deadline.left  # httpx's own timeout begins anew with every block
            response = httpx.Response(response.status_code, headers=_plain(response.headers), content=bytes(content))
        except httpx.TimeoutException as error:
            raise ControlCallError(
                f"{self.endpoint}: {path} did not answer in time ({deadline.what} has {deadline.seconds:g} s): {type(error).__name__}",
                call=path,
            ) from error
        except httpx.HTTPError as error:
            raise Unreachable(f"{self.endpoint}: {path} failed: {type(error).__name__}: {error}", call=path) from error
        if response.status_code >= 400:
            raise self._failed(path, response.status_code, response.text, "")
        return response

    def _failed(self, path: str, status: int, text: str, expected: str) -> ControlCallError:
        hint = ""
        if status == 401:
            given = "Authorization" in self._http.headers
            hint = "; the API key is not this engine's" if given else "; the engine wants an API key: give the sender one (--api-key-env)"
        elif status == 403:
            hint = "; the API key does not allow administrative calls"
        why = f" ({expected})" if expected else ""
        return ControlCallError(
            f"{self.endpoint}: {path.split('?')[0]} answered {status}{why}: {text[:2000].strip()}{hint}",
            call=path,
            status=status,
            body=text[:20000],
        )


def _plain(headers: httpx.Headers) -> dict[str, str]:
    """Without what no longer holds of a body that was read and decoded."""
    return {name: value for name, value in headers.items() if name not in ("content-encoding", "content-length", "transfer-encoding")}


def _number_ranks(tables: list[ParameterTable]) -> list[ParameterTable]:
    """Number ranks over data-parallel replicas and prove that none is missing.

    Raises:
        DocumentError: a rank is missing or comes twice.
    """
    from dataclasses import replace

    numbered = []
    for table in tables:
        place = table.placement
        numbered.append(replace(table, placement=replace(place, rank=place.dp_rank * place.tp_size + place.tp_rank)))
    for role in {table.role for table in numbered}:
        ranks = sorted(table.placement.rank for table in numbered if table.role == role)
        place = next(table.placement for table in numbered if table.role == role)
        replicas = len({table.placement.dp_rank for table in numbered if table.role == role})
        expected = list(range(place.tp_size * replicas))
        if ranks != expected:
            missing = sorted(set(expected) - set(ranks))
            raise DocumentError(f"{len(set(ranks))} of {len(expected)} ranks published a {role} table, missing {missing}, seen {ranks}")
    return numbered
