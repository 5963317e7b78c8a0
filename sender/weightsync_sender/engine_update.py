"""One engine in one update: its control calls in their order, how far it has come, and the way back from there.

Idle -> Leased -> Paused -> Open -> Written -> Closed -> Ready. From Paused back, nothing has been written: it is resumed with its
old version. From the first written byte on, it is Ready or fenced: left paused, with its session open, so that whoever comes next
can tell.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum

from weightsync_core.errors import ControlCallError, EngineRefused, LeaseLost, Unreachable, WeightSyncError
from weightsync_sender.engine import Engine
from weightsync_sender.engine_client import Deadline
from weightsync_sender.progress import Progress
from weightsync_sender.replica.model import require_same_table
from weightsync_sender.report import EngineState, Failure, failure_of
from weightsync_sender.settings import PauseMode, SenderSettings
from weightsync_sender.stream import Target
from weightsync_sender.transports import Transport

log = logging.getLogger(__name__)

LEASE_SECONDS = 15.0
"""How long an engine stays reserved for a sender that no longer renews; it renews every third of that."""

_OVERTAKEN = "this process did not renew its lease in time; another sender may have updated this engine since"


class Stage(IntEnum):
    """How far one engine has come."""

    IDLE = 0
    LEASED = 1
    PAUSED = 2
    OPEN = 3
    WRITTEN = 4
    CLOSED = 5
    READY = 6


@dataclass
class EngineUpdate:
    """One engine in one update."""

    engine: Engine
    settings: SenderSettings
    version: str
    transport: Transport
    progress: Progress
    leads: bool = True
    """Whether this trainer rank makes the engine's control calls; the others write only, under the same lease."""
    owner: str = ""
    """Of the lease."""
    stage: Stage = Stage.IDLE
    error: str = ""
    failure: Failure | None = None
    was_fenced: bool = False
    """A session was open before: the engine holds who knows what."""
    posted: bool = False
    others_write: bool = False
    """Whether other trainer ranks may be writing, of whom nothing is known until they tell."""
    hung_elsewhere: bool = False
    """Whether another trainer rank has given up on a write that may still land."""
    written: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    via: set[str] = field(default_factory=set)
    """Transports that other trainer ranks really used."""
    targets: list[Target] = field(default_factory=list)
    pending: set[int] = field(default_factory=set)
    """Targets that are not yet complete."""
    outcome: EngineState | None = None
    """How it was left; None while it takes part."""
    leaving: threading.Lock = field(default_factory=threading.Lock)
    lease_until: float = 0.0
    """Until when (monotonic clock) this engine is surely reserved for this update."""

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of a block to a phase."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - started

    def fail(self, error: BaseException | str, failure: Failure | None = None) -> None:
        """Remember the first failure, of this kind or of the error's own."""
        if not self.error:
            self.error = str(error) or type(error).__name__
            self.failure = failure or (failure_of(error) if isinstance(error, BaseException) else Failure.INTERNAL)
            log.warning("engine failed engine=%s version=%s stage=%s error=%r", self.engine.name, self.version, self.stage.name, self.error)
            self.progress("failed", {"engine": self.engine.name, "error": self.error})

    def take_lease(self, deadline: Deadline, *, renew: bool = False) -> tuple[bool, str]:
        """Take or keep the lease; (granted, who holds it)."""
        asked = time.monotonic()
        granted, holder = self.engine.client.take_lease(self.owner, LEASE_SECONDS, deadline, renew=renew)
        if granted:
            self.lease_until = asked + LEASE_SECONDS
        return granted, holder

    def renew_lease(self) -> None:
        """Keep it; a lease that is lost ends this engine's part. One that is not renewed in time is seen before the next write."""
        with contextlib.suppress(WeightSyncError):
            granted, _ = self.take_lease(Deadline.after(LEASE_SECONDS / 3, "renewing the lease"), renew=True)
            if not granted:
                self.fail(_OVERTAKEN, Failure.LEASE)

    def read_tables(self) -> None:
        """Read the engine's tables as they are now."""
        deadline = Deadline.after(self.settings.timeouts.connect, "reading tables")
        self.engine.read_tables(self.settings, self.transport.protocol, deadline)

    def forbidden(self) -> str:
        """Why nothing more may be written, or an empty text. Asked right before every write."""
        if self.error:
            return self.error
        if time.monotonic() > self.lease_until:
            return _OVERTAKEN
        return ""

    def open(self, cancelled: threading.Event) -> None:
        """Reserve, pause, flush, begin, and read the tables as they are now."""
        client, limits = self.engine.client, self.settings.timeouts
        before = self.engine.generation
        self._reserve(cancelled)
        self.read_tables()  # whoever had it since they were read may have finished, or fenced it
        self.was_fenced = any(table.open_session for table in self.engine.tables) or self.engine.fenced
        with self.phase("pause"):
            self.stage = Stage.PAUSED  # from here on it must be resumed, whether or not the answer arrives
            client.pause(self.settings.pause_mode.value, Deadline.after(limits.pause, "pausing generation"))
        if self.settings.pause_mode is not PauseMode.IN_PLACE and self.settings.flush_after_update:
            with self.phase("flush"):
                _go_on_unless(cancelled)
                client.flush_cache(Deadline.after(limits.flush, "flushing the cache"))
        with self.phase("begin"):
            _go_on_unless(cancelled)
            self._begin(cancelled)
            self.read_tables()
            if self.engine.generation != before:
                raise EngineRefused(f"{self.engine.name} restarted between connect and begin; the next update connects to it again")
            for table in self.engine.tables:
                require_same_table(self.engine.ranks[table.role, table.placement.rank].replica, table)

    def join(self) -> None:
        """Take part in the session that the leader opened: write under its lease, which this rank helps to renew.

        Raises:
            LeaseLost: it is gone already.
        """
        granted, holder = self.take_lease(Deadline.after(LEASE_SECONDS / 3, "joining the lease"), renew=True)
        if not granted:
            raise LeaseLost(f"{self.engine.name} is being updated by another sender ({holder})")
        self.stage = Stage.OPEN

    def leave(self) -> None:
        """End this rank's part in a session that another one leads."""
        self.outcome = EngineState.SKIPPED
        if self.engine.stuck and not self.transport.revocable:
            self.engine.keep_lease(self.owner, LEASE_SECONDS)

    def _reserve(self, cancelled: threading.Event) -> None:
        """Take the lease, waiting for another sender to finish."""
        deadline = Deadline.after(self.settings.timeouts.lease, "waiting for another sender to finish")
        while True:
            granted, holder = self.take_lease(deadline)
            if granted:
                self.stage = max(self.stage, Stage.LEASED)
                return
            if cancelled.wait(0.2):
                raise EngineRefused("the update was cancelled")
            if deadline.at - time.monotonic() < 0.2:
                raise LeaseLost(f"{self.engine.name} is being updated by another sender ({holder})")

    def _begin(self, cancelled: threading.Event) -> None:
        """Begin; a session that a dead trainer left open is ended first.

        With the plugin the lease has proven that its owner is gone. Without, a live sender would end its session itself.
        """
        client, limits = self.engine.client, self.settings.timeouts
        deadline = Deadline.after(limits.begin, "beginning the update")
        patience = time.monotonic() + (0.0 if client.has_lease else limits.lease)
        while not client.begin(deadline):
            self.was_fenced = True
            if time.monotonic() >= patience:
                log.warning("recovering a session left open engine=%s", self.engine.name)
                if not self.engine.stock:  # what its owner still has under way must not land on newer bytes
                    client.revoke(Deadline.after(limits.connect, "revoking its sessions"))
                client.end(Deadline.after(limits.end, "ending a session left open"))
            elif cancelled.wait(0.5):
                raise EngineRefused("the update was cancelled")
        self.stage = Stage.OPEN

    def require_unchanged(self) -> None:
        """Prove that what was written is what the engine holds: the same processes, memory and session as at the beginning.

        Raises:
            EngineRefused: something else changed the engine meanwhile.
        """
        if self.engine.stock:
            return  # says nothing of the kind
        with self.phase("verify"):
            seen = self.engine.client.generations(Deadline.after(self.settings.timeouts.connect, "asking whether it is unchanged"))
        if seen != {(table.generation, True) for table in self.engine.tables}:
            raise EngineRefused(
                f"{self.engine.name} changed while it was written: it restarted, its weight memory was released, or its session was ended"
            )

    def finish(self) -> None:
        """After the last byte: end the session, unless the update was given up meanwhile."""
        client, limits = self.engine.client, self.settings.timeouts
        if why := self.forbidden():
            raise LeaseLost(f"{self.engine.name}: not ended: {why}")
        with self.phase("end"):
            client.end(Deadline.after(limits.end, "ending the update"))
            self.stage = Stage.CLOSED

    def publish(self) -> None:
        """Set the version and go on, unless the update was given up meanwhile."""
        client, limits = self.engine.client, self.settings.timeouts
        if why := self.forbidden():
            raise LeaseLost(f"{self.engine.name}: not published: {why}")
        with self.phase("resume"):
            client.set_version(self.version, Deadline.after(limits.resume, "setting the version"))
            client.resume(Deadline.after(limits.resume, "resuming generation"))
            self.stage = Stage.READY
        self._release()

    def back_out(self) -> EngineState:
        """Leave the engine in the best state that can be had; once, whoever asks first."""
        with self.leaving:
            if self.outcome is None:
                self.outcome = self._leave()
                self.engine.fenced = self.outcome is EngineState.FENCED or (self.engine.fenced and self.outcome is not EngineState.READY)
            return self.outcome

    def _leave(self) -> EngineState:
        if self.stage is Stage.READY:
            return EngineState.READY
        try:
            if self.stage < Stage.LEASED:
                return EngineState.SKIPPED
            # Also tells whether it still answers.
            ours, _ = self.take_lease(Deadline.after(self.settings.timeouts.resume, "asking whether the lease still holds"), renew=True)
            return self._back_out() if ours else self._step_aside()
        except Exception as error:  # whatever it is, the other engines must be backed out too
            self.error = f"{self.error}; then, backing out: {error}"
            if isinstance(error, Unreachable):
                return EngineState.GONE
            return EngineState.FENCED if self.stage >= Stage.PAUSED else EngineState.SKIPPED

    def _back_out(self) -> EngineState:
        client, limits = self.engine.client, self.settings.timeouts
        dirty = self.was_fenced or self.posted or self.others_write or any(target.posted for target in self.targets)
        state = EngineState.SKIPPED
        if dirty and self.stage >= Stage.PAUSED:
            state = EngineState.FENCED
            if self.stage in (Stage.PAUSED, Stage.CLOSED):
                client.begin(Deadline.after(limits.begin, "fencing"))  # an open session marks it for whoever comes next
        elif self.stage is Stage.PAUSED and self.engine.stock and not client.begin(Deadline.after(limits.begin, "looking for a session")):
            # Nothing else of a stock engine tells whether somebody left it half written.
            state = EngineState.FENCED
        elif self.stage >= Stage.PAUSED:
            # begin may have reached the engine although its answer did not
            with contextlib.suppress(ControlCallError):
                client.end(Deadline.after(limits.end, "ending the update"))
            client.resume(Deadline.after(limits.resume, "resuming generation"))
        self._release()
        return state

    def _step_aside(self) -> EngineState:
        """Another sender has had this engine since: it is its to leave ready or fenced.

        Unless a write of ours may have landed on its bytes, which is when the engine must not go on serving them.
        """
        if _OVERTAKEN not in self.error:  # a write that was cut off may have failed first
            self.error = f"{self.error}; {_OVERTAKEN}" if self.error else _OVERTAKEN
        self.failure = Failure.LEASE
        if self.transport.revocable or self.stage is not Stage.OPEN or not self.posted:
            return EngineState.SKIPPED
        limits, before = self.settings.timeouts, self.engine.generation
        self._reserve(threading.Event())
        self.read_tables()
        if self.engine.generation != before:
            self.error += f"; {self.engine.name} restarted since and serves what it was started with"
            self._release()
            return EngineState.SKIPPED
        self.engine.client.pause(self.settings.pause_mode.value, Deadline.after(limits.pause, "pausing generation"))
        self.engine.client.begin(Deadline.after(limits.begin, "fencing"))
        self._release()
        return EngineState.FENCED

    def _release(self) -> None:
        if self.others_write or (self.hung_elsewhere and not self.transport.revocable):
            return  # the ranks that write keep renewing it for as long as their writes may land; then it expires
        if self.engine.stuck and not self.transport.revocable:
            # Nothing can stop that write: until it is over, no other sender may take the engine for clean.
            self.engine.keep_lease(self.owner, LEASE_SECONDS)
            return
        try:
            self.engine.client.give_back_lease(self.owner, Deadline.after(5.0, "giving the lease back"))
        except (ControlCallError, WeightSyncError) as error:
            log.info("lease not given back, it expires by itself engine=%s error=%r", self.engine.name, str(error))


def _go_on_unless(cancelled: threading.Event) -> None:
    """A step that took long must not go on with the next one behind the back of an update that was given up."""
    if cancelled.is_set():
        raise EngineRefused("the update was cancelled")
