"""Asks pods what they are, each in a task of its own, and tells when an answer changed.

Bounded in number and in time: an engine that hangs delays no other. The last answers are values that anybody may read.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import aiohttp

from weightsync_core.protocol import IDENTITY_ROUTE
from weightsync_operator.compatibility import EngineFacts, NoAnswer, Reason, TrainerFacts
from weightsync_operator.resources import Key
from weightsync_operator.settings import OperatorSettings

log = logging.getLogger(__name__)

_MAX_BYTES = 4 << 20
"""Of an answer; identity with a model's config.json has a few KiB."""
_LONGEST_TEXT = 500
"""Characters of anything that a pod says and a status repeats."""
_MOST_RANKS = 1 << 16
"""Of one engine."""

Facts = TypeVar("Facts", EngineFacts, TrainerFacts)


@dataclass(frozen=True, slots=True)
class Address:
    """Where a pod answers, and which one it is: another uid is asked from scratch."""

    url: str
    uid: str


@dataclass(slots=True)
class Asked(Generic[Facts]):
    """One pod's state."""

    address: Address
    task: asyncio.Task[None] | None = None
    answer: Facts | NoAnswer | None = None
    asked_at: float = 0.0
    """Monotonic time at which the question of the latest answer was put."""
    good_at: float = 0.0
    poke: asyncio.Event = field(default_factory=asyncio.Event)
    suspect: bool = False


class Http:
    """One bounded HTTP client for all pods."""

    def __init__(self, settings: OperatorSettings) -> None:
        self._settings = settings
        self._slots = asyncio.Semaphore(settings.concurrent_probes)
        self._suspects = asyncio.Semaphore(settings.concurrent_suspects)
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=settings.answer_seconds, connect=None, sock_connect=settings.connect_seconds),
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            headers={"Authorization": f"Bearer {settings.api_key}"} if settings.api_key else {},
        )

    async def close(self) -> None:
        """Close connections."""
        await self._session.close()

    @contextlib.asynccontextmanager
    async def slot(self, suspect: bool) -> AsyncIterator[None]:
        """Wait for the right to ask."""
        async with self._suspects if suspect else contextlib.nullcontext(), self._slots:
            yield

    async def get(self, url: str) -> tuple[int, Any]:
        """HTTP status and JSON answer (None for anything else).

        Raises:
            OSError, TimeoutError: no connection or no answer.
            ValueError: an answer without end.
        """
        async with self._session.get(url, allow_redirects=False) as response:
            body = bytearray()
            async for block in response.content.iter_chunked(1 << 16):
                body += block
                if len(body) > _MAX_BYTES:
                    raise ValueError(f"more than {_MAX_BYTES} bytes")
            try:
                return response.status, json.loads(body)
            except ValueError:
                return response.status, None


class Prober(Generic[Facts]):
    """Keeps asking a changing set of pods."""

    def __init__(
        self,
        http: Http,
        ask: Callable[[Http, str], Awaitable[Facts | NoAnswer]],
        changed: Callable[[Key], None],
        spawn: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]],
        settings: OperatorSettings,
    ) -> None:
        self._http, self._changed, self._spawn, self._settings = http, changed, spawn, settings
        self._ask: Callable[[Http, str], Awaitable[Facts | NoAnswer]] = ask
        self._asked: dict[Key, dict[str, Asked[Facts]]] = {}

    def watch(self, owner: Key, wanted: Mapping[str, Address]) -> None:
        """Ask exactly these pods for one WeightSync; those that are known go on undisturbed."""
        known = self._asked.setdefault(owner, {})
        for name in list(known):
            if known[name].address != wanted.get(name):
                self._stop(known.pop(name))
        for name, address in wanted.items():
            if name not in known:
                state: Asked[Facts] = Asked(address)
                state.task = self._spawn(self._keep_asking(owner, state), f"probe {owner} {name}")
                known[name] = state
        if not known:
            del self._asked[owner]

    def answers(self, owner: Key) -> dict[str, Facts | NoAnswer]:
        """Latest answers by name; pods that were not asked yet are missing."""
        return {name: state.answer for name, state in self._asked.get(owner, {}).items() if state.answer is not None}

    def asked_at(self, owner: Key, name: str) -> float:
        """When the question behind the latest answer was put (monotonic); 0 for never."""
        state = self._asked.get(owner, {}).get(name)
        return state.asked_at if state is not None else 0.0

    def poke(self, owner: Key, names: set[str] | None = None) -> None:
        """Ask some pods again at once."""
        for name, state in self._asked.get(owner, {}).items():
            if names is None or name in names:
                state.poke.set()

    def close(self) -> None:
        """Stop asking."""
        for owner in list(self._asked):
            self.watch(owner, {})

    @staticmethod
    def _stop(state: Asked[Facts]) -> None:
        if state.task is not None:
            state.task.cancel()

    async def _keep_asking(self, owner: Key, state: Asked[Facts]) -> None:
        pause = self._settings.retry_seconds
        while True:
            state.poke.clear()
            async with self._http.slot(state.suspect):
                began = time.monotonic()
                answer = await self._one(state)
            before = state.answer
            state.suspect = isinstance(answer, NoAnswer) and answer.reason in (Reason.NOT_ANSWERING, Reason.UNREACHABLE)
            if not isinstance(answer, NoAnswer):
                state.good_at = began
                pause = self._settings.probe_seconds
            elif before is not None and not isinstance(before, NoAnswer):
                if answer.reason is Reason.NOT_ANSWERING and began - state.good_at < self._settings.patience_seconds:
                    answer = before  # busy is not gone
                pause = self._settings.retry_seconds
            else:
                pause = min(pause * 2, self._settings.probe_seconds)
            state.asked_at, state.answer = began, answer
            if answer != before:
                self._changed(owner)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(state.poke.wait(), pause)

    async def _one(self, state: Asked[Facts]) -> Facts | NoAnswer:
        url = state.address.url
        try:
            return await self._ask(self._http, url)
        except aiohttp.ClientConnectorError as error:
            if isinstance(error.os_error, ConnectionRefusedError):
                return NoAnswer(
                    Reason.CONNECTION_REFUSED,
                    f"nothing listens at {url}: it is starting, ended, or listens on 127.0.0.1 only (start it with --host 0.0.0.0)",
                )
            return NoAnswer(Reason.UNREACHABLE, f"no connection to {url}: {error.os_error.strerror or error.os_error}")
        except aiohttp.ConnectionTimeoutError:
            return NoAnswer(Reason.UNREACHABLE, f"no connection to {url} in {self._settings.connect_seconds:g} s")
        except TimeoutError:
            return NoAnswer(Reason.NOT_ANSWERING, f"{url} takes connections and gave no answer in {self._settings.answer_seconds:g} s")
        except (aiohttp.ClientError, OSError) as error:
            return NoAnswer(Reason.CONNECTION_REFUSED, f"{url} broke the connection off: {type(error).__name__}: {error}")
        except Exception as error:  # whatever a pod answers, it ends nothing but its own part
            return NoAnswer(Reason.NOT_AN_ENGINE, f"{url} answers something else than expected: {type(error).__name__}: {error}")


async def ask_engine(http: Http, url: str) -> EngineFacts | NoAnswer:
    """Ask an engine who it is: the plugin's identity, else stock sglang's ``/server_info``, and ``/model_info``."""
    status, model = await http.get(f"{url}/model_info")
    refusal = _refused(url, status, model, "/model_info")
    if refusal is not None:
        return refusal
    version = _text(model["weight_version"])
    status, identity = await http.get(url + IDENTITY_ROUTE)
    if status == 404:
        status, info = await http.get(f"{url}/server_info")
        return _refused(url, status, info, "/server_info") or _stock_facts(info, version)
    return _refused(url, status, identity, IDENTITY_ROUTE) or _plugin_facts(identity, version)


async def ask_trainer(http: Http, url: str) -> TrainerFacts | NoAnswer:
    """Ask a sender's ``/status``."""
    status, answer = await http.get(f"{url}/status")
    refusal = _refused(url, status, answer, "/status")
    if refusal is not None:
        return refusal
    return TrainerFacts(
        process=_text(answer["process"]),
        sglang=_text(answer["identity"]["sglang"]),
        architecture=_text(answer["identity"]["arch"]),
        epoch=int(answer["epoch"]),
        version=_text(answer["version"]),
        updating=_text(answer["updating"]),
        updated_at=_time(answer["updated_at"]),
    )


def _refused(url: str, status: int, answer: Any, route: str) -> NoAnswer | None:
    if status in (401, 403):
        return NoAnswer(
            Reason.UNAUTHORIZED, f"{url}{route} answered {status}: give the operator the engines' API key (engineApiKey in the chart)"
        )
    if status == 503:
        return NoAnswer(Reason.CONNECTION_REFUSED, f"{url}{route} answered 503: it is starting")
    if status != 200 or not isinstance(answer, dict):
        return NoAnswer(Reason.NOT_AN_ENGINE, f"{url}{route} answered {status}, expected 200 and a JSON object")
    return None


def _plugin_facts(identity: Mapping[str, Any], version: str) -> EngineFacts:
    ranks = identity["ranks"]
    first = ranks[0]
    sizes = [sum(rank["bytes"].values()) for rank in ranks]
    return EngineFacts(
        generation="+".join(rank["generation"] for rank in ranks),
        sglang=_text(first["identity"]["sglang"]),
        architecture=_text(first["identity"]["arch"]),
        transports=tuple(sorted(set.intersection(*({_text(name) for name in rank["transports"]} for rank in ranks)))),
        unavailable={_text(name): str(why)[:_LONGEST_TEXT] for rank in ranks for name, why in rank["unavailable"].items()},
        size=_count(identity["size"]),
        nodes=_count(identity["nodes"]),
        roles=tuple(_text(role) for role in first["bytes"]),
        nbytes=sum(sizes) * identity["size"] // len(ranks),
        version=version,
    )


def _stock_facts(info: Mapping[str, Any], version: str) -> EngineFacts:
    publishes = bool(info.get("remote_instance_weight_loader_start_seed_via_transfer_engine"))
    replicas = 1 if info.get("enable_dp_attention") else int(info.get("dp_size") or 1)
    return EngineFacts(
        generation=f"stock@{json.dumps(info.get('startup_time'), sort_keys=True)}",
        sglang=_text(info.get("version", "")),
        architecture="cpu" if info.get("device") == "cpu" else "",
        transports=("mooncake",) if publishes else (),
        unavailable={},
        size=_count(int(info["tp_size"]) * int(info.get("pp_size") or 1) * replicas),
        nodes=_count(int(info.get("nnodes") or 1)),
        roles=("target",),
        nbytes=0,
        version=version,
    )


def _text(value: Any) -> str:
    """Raises: ValueError: no text, or one that is too long for a status."""
    if not isinstance(value, str) or len(value) > _LONGEST_TEXT:
        raise ValueError(f"expected a text of at most {_LONGEST_TEXT} characters, got {str(value)[:40]!r}")
    return value


def _count(value: Any) -> int:
    """Raises: ValueError: no positive number."""
    if not isinstance(value, int) or not 0 < value <= _MOST_RANKS:
        raise ValueError(f"expected a number from 1 to {_MOST_RANKS}, got {str(value)[:40]!r}")
    return value


def _time(value: Any) -> float:
    """Raises: ValueError: no moment."""
    seconds = float(value)
    if not math.isfinite(seconds):
        raise ValueError(f"expected a time, got {seconds}")
    return seconds
