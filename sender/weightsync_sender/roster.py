"""Which engines an update is for: a fixed list, or those of this trainer pod's assignment."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from weightsync_core.assignment import AssignedEngine, Assignment
from weightsync_core.endpoints import parse_endpoint
from weightsync_core.errors import EndpointError, listing
from weightsync_sender.engine import Engine
from weightsync_sender.engine_client import EngineClient
from weightsync_sender.membership import Membership
from weightsync_sender.settings import PauseMode, SenderSettings, SettingsError, Verify

log = logging.getLogger(__name__)

DEPARTURE_SECONDS = 6.0
"""How long a failed engine is given to leave the assignment; the operator needs up to 5 s to see that a pod is gone."""


class Roster(Protocol):
    """Where a sender's engines come from."""

    def refresh(self, settings: SenderSettings) -> tuple[list[Engine], SenderSettings]:
        """The engines of the next update, those that did not change with their connections, and the settings in force."""
        ...

    def departed(self, names: set[str]) -> set[str]:
        """Those of some failed engines that are no longer to be written."""
        ...

    def stuck(self) -> bool:
        """Whether a write to any of them is under way that was given up on."""
        ...

    def close(self) -> None:
        """Close engines."""
        ...


class FixedEngines:
    """Engines named once."""

    def __init__(self, urls: Sequence[str], api_key: str | None, minimum: int | None) -> None:
        """Raises: EndpointError: an address that cannot be read, none at all, or one twice; SettingsError: fewer than ``minimum``."""
        endpoints = [parse_endpoint(text) for text in urls]
        if not endpoints:
            raise EndpointError("no engines given; expected at least one address like http://10.0.0.7:30000")
        twice = sorted({str(endpoint) for endpoint in endpoints if endpoints.count(endpoint) > 1})
        if twice:
            raise EndpointError(f"engines given twice: {listing(twice)}")
        if minimum is not None and minimum > len(endpoints):
            raise SettingsError(f"minimum_engines is {minimum}, {len(endpoints)} engines were given")
        self._engines = [Engine(endpoint, EngineClient(endpoint, api_key)) for endpoint in endpoints]

    def refresh(self, settings: SenderSettings) -> tuple[list[Engine], SenderSettings]:
        """Always the same."""
        return self._engines, settings

    def departed(self, names: set[str]) -> set[str]:
        """None: who was named is meant."""
        return set()

    def stuck(self) -> bool:
        """Whether a write hangs."""
        return any(engine.still_stuck() for engine in self._engines)

    def close(self) -> None:
        """Close engines."""
        for engine in self._engines:
            engine.close()


class AssignedEngines:
    """Engines of the assignment that the operator hands out; taken over at the start of an update."""

    def __init__(self, membership: Membership, api_key: str | None, first_seconds: float) -> None:
        """Args: first_seconds: how long the first update waits for the first assignment."""
        self._membership, self._api_key, self._first_seconds = membership, api_key, first_seconds
        self._engines: dict[str, tuple[AssignedEngine, Engine]] = {}

    def refresh(self, settings: SenderSettings) -> tuple[list[Engine], SenderSettings]:
        """Raises: DeadlineExceeded: no assignment came."""
        assignment = self._membership.wait(self._first_seconds)
        wanted = {engine.id: engine for engine in assignment.engines}
        stuck = {}
        for name in list(self._engines):
            known, engine = self._engines[name]
            if wanted.get(name) != known:
                engine.close()
                stuck[name] = engine.stuck  # if it is the same process after all
                del self._engines[name]
        for name, assigned in wanted.items():
            if name not in self._engines:
                endpoint = parse_endpoint(assigned.url)
                client = EngineClient(endpoint, self._api_key)
                self._engines[name] = (assigned, Engine(endpoint, client, id=name, stuck=stuck.get(name, [])))
        return [self._engines[name][1] for name in wanted], assigned_settings(settings, assignment)

    def departed(self, names: set[str]) -> set[str]:
        """Those whose process or pod the operator has seen go, given a moment to see it."""
        before = {name: self._engines[name][0] for name in names}

        def gone(assignment: Assignment) -> set[str]:
            return {name for name, engine in before.items() if engine not in assignment.engines}

        self._membership.wait_until(lambda assignment: gone(assignment) == names, DEPARTURE_SECONDS)
        current = self._membership.current
        return gone(current) if current is not None else set()

    def stuck(self) -> bool:
        """Whether a write hangs."""
        return any(engine.still_stuck() for _, engine in self._engines.values())

    def close(self) -> None:
        """Close engines and stop watching."""
        self._membership.close()
        for _, engine in self._engines.values():
            engine.close()


def assigned_settings(settings: SenderSettings, assignment: Assignment) -> SenderSettings:
    """Settings with what the WeightSync says put over them; fields that this version does not know are left out, loudly."""
    known = {"buffer_size", "verify", "pause_mode", "minimum_engines"}
    unknown = sorted(set(assignment.update) - known)
    if unknown:
        log.warning("assignment has settings that this sender does not know, left out: %s", listing(unknown))
    update = {name: value for name, value in assignment.update.items() if name in known}
    if "verify" in update:
        update["verify"] = Verify(update["verify"])
    if "pause_mode" in update:
        update["pause_mode"] = PauseMode(update["pause_mode"])
    transport = assignment.transport
    return replace(
        settings,
        transport=transport.get("backend", settings.transport),
        require_rdma=transport.get("require_rdma", settings.require_rdma),
        **update,
    )
