"""The order of one update, and every way out of it.

Each engine goes Idle -> Paused -> Open -> Written -> Closed -> Ready. From Paused back, nothing has been written: it is
resumed with its old version. From the first written byte on, it is Ready or fenced: left paused, with its session open,
so that whoever comes next can tell. Engines go through their control calls side by side, each with its own deadlines;
one that fails drops out and the others finish.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from enum import IntEnum
from types import FrameType
from typing import Any

import torch

from weightsync_core.errors import ControlCallError, EngineRefused, LeaseLost, SourceError, Unreachable, WeightSyncError
from weightsync_sender import verify
from weightsync_sender.engine import ConfigFolders, Engine
from weightsync_sender.engine_client import Deadline
from weightsync_sender.replica.compiled import ReplicaStore
from weightsync_sender.replica.model import require_same_table
from weightsync_sender.report import EngineReport, EngineState, Failure, UpdateReport, failure_of
from weightsync_sender.settings import PauseMode, SenderSettings, Verify
from weightsync_sender.sources import Source
from weightsync_sender.staging import Ring, SourceMemory
from weightsync_sender.stream import Stream, StreamLimits, Target
from weightsync_sender.transports import Transport

log = logging.getLogger(__name__)

LEASE_SECONDS = 15.0
"""How long an engine stays reserved for a sender that no longer renews; it renews every third of that."""
GRACE_SECONDS = 15.0
"""How long an interrupted update waits for control calls under way before it backs out."""

_OVERTAKEN = "this process did not renew its lease in time; another sender may have updated this engine since"

Progress = Callable[[str, Mapping[str, Any]], None]
"""Called with an event's name and its fields; if it raises, it is not called any more."""


class _Stage(IntEnum):
    """How far one engine has come."""

    IDLE = 0
    LEASED = 1
    PAUSED = 2
    OPEN = 3
    WRITTEN = 4
    CLOSED = 5
    READY = 6


@dataclass
class _Session:
    """One engine in one update."""

    engine: Engine
    settings: SenderSettings
    owner: str
    version: str
    transport: Transport
    stage: _Stage = _Stage.IDLE
    error: str = ""
    failure: Failure | None = None
    was_fenced: bool = False
    """A session was open before: the engine holds who knows what."""
    posted: bool = False
    written: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
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
            self.stage = _Stage.PAUSED  # from here on it must be resumed, whether or not the answer arrives
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

    def _reserve(self, cancelled: threading.Event) -> None:
        """Take the lease, waiting for another sender to finish."""
        deadline = Deadline.after(self.settings.timeouts.lease, "waiting for another sender to finish")
        while True:
            granted, holder = self.take_lease(deadline)
            if granted:
                self.stage = max(self.stage, _Stage.LEASED)
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
        self.stage = _Stage.OPEN

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
            self.stage = _Stage.CLOSED

    def publish(self) -> None:
        """Set the version and go on, unless the update was given up meanwhile."""
        client, limits = self.engine.client, self.settings.timeouts
        if why := self.forbidden():
            raise LeaseLost(f"{self.engine.name}: not published: {why}")
        with self.phase("resume"):
            client.set_version(self.version, Deadline.after(limits.resume, "setting the version"))
            client.resume(Deadline.after(limits.resume, "resuming generation"))
            self.stage = _Stage.READY
        self._release()

    def back_out(self) -> EngineState:
        """Leave the engine in the best state that can be had; once, whoever asks first."""
        with self.leaving:
            if self.outcome is None:
                self.outcome = self._leave()
                self.engine.fenced = self.outcome is EngineState.FENCED or (self.engine.fenced and self.outcome is not EngineState.READY)
            return self.outcome

    def _leave(self) -> EngineState:
        if self.stage is _Stage.READY:
            return EngineState.READY
        try:
            if self.stage < _Stage.LEASED:
                return EngineState.SKIPPED
            # Also tells whether it still answers.
            ours, _ = self.take_lease(Deadline.after(self.settings.timeouts.resume, "asking whether the lease still holds"), renew=True)
            return self._back_out() if ours else self._step_aside()
        except Exception as error:  # whatever it is, the other engines must be backed out too
            self.error = f"{self.error}; then, backing out: {error}"
            if isinstance(error, Unreachable):
                return EngineState.GONE
            return EngineState.FENCED if self.stage >= _Stage.PAUSED else EngineState.SKIPPED

    def _back_out(self) -> EngineState:
        client, limits = self.engine.client, self.settings.timeouts
        dirty = self.was_fenced or self.posted or any(target.posted for target in self.targets)
        state = EngineState.SKIPPED
        if dirty and self.stage >= _Stage.PAUSED:
            state = EngineState.FENCED
            if self.stage in (_Stage.PAUSED, _Stage.CLOSED):
                client.begin(Deadline.after(limits.begin, "fencing"))  # an open session marks it for whoever comes next
        elif self.stage is _Stage.PAUSED and self.engine.stock and not client.begin(Deadline.after(limits.begin, "looking for a session")):
            # Nothing else of a stock engine tells whether somebody left it half written.
            state = EngineState.FENCED
        elif self.stage >= _Stage.PAUSED:
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
        if self.transport.revocable or self.stage is not _Stage.OPEN or not self.posted:
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
        if self.engine.stuck and not self.transport.revocable:
            # Nothing can stop that write: until it is over, no other sender may take the engine for clean.
            self.engine.keep_lease(self.owner, LEASE_SECONDS)
            return
        try:
            self.engine.client.give_back_lease(self.owner, Deadline.after(5.0, "giving the lease back"))
        except (ControlCallError, WeightSyncError) as error:
            log.info("lease not given back, it expires by itself engine=%s error=%r", self.engine.name, str(error))


class Update:
    """One version brought to all engines."""

    def __init__(
        self,
        engines: Sequence[Engine],
        source: Source,
        version: str,
        settings: SenderSettings,
        transport: Transport,
        store: ReplicaStore,
        memory: SourceMemory,
        make_ring: Callable[[Sequence[Engine], int], Ring],
        folders: ConfigFolders,
        rate: float | None,
        progress: Progress,
    ) -> None:
        self._engines, self._source, self._version, self._settings = engines, source, version, settings
        self._transport, self._store, self._memory, self._make_ring, self._folders = transport, store, memory, make_ring, folders
        self._progress = _harmless(progress)
        self.rate = rate
        """Bytes per second to one target, the best that was measured."""
        owner = uuid.uuid4().hex
        self._sessions = [_Session(engine, settings, owner, version, transport) for engine in engines]
        self._cancelled = threading.Event()
        self._over = threading.Event()
        self._direct = self._packed = 0
        self._passes = 2 if settings.verify is Verify.SNAPSHOT else 1
        self._unused: tuple[str, ...] = ()

    def run(self) -> UpdateReport:
        """Do it. Engines' failures are in the report; the source's and the user's interrupts are raised after backing out."""
        started = time.monotonic()
        pool = ThreadPoolExecutor(max_workers=max(2 * len(self._sessions), 1), thread_name_prefix="weightsync-control")
        states: dict[str, EngineState] = {}
        with _terminations_raise():
            try:
                self._connect(pool)
                ready = self._live()
                if ready:
                    threading.Thread(target=self._renew_leases, name="weightsync-lease", daemon=True).start()
                    self._open(pool, ready)
                    self._write(pool)
            finally:
                with _signals_deferred():
                    self._cancelled.set()
                    self._over.set()
                    states = self._back_out(pool)
        return self._report(states, time.monotonic() - started)

    def _live(self) -> list[_Session]:
        return [session for session in self._sessions if not session.error]

    def _connect(self, pool: ThreadPoolExecutor) -> None:
        limits = self._settings.timeouts

        def connect(session: _Session) -> None:
            with session.phase("connect"):
                if session.engine.still_stuck():
                    raise EngineRefused(f"{session.engine.name}: a write of an earlier update is still under way and could land later")
                deadline = Deadline.after(limits.connect, "connecting")
                session.engine.connect(self._settings, self._transport.protocol, self._folders, deadline)

        self._side_by_side(pool, self._sessions, connect)
        manifest = self._source.manifest()
        refused: SourceError | None = None
        for session in self._live():
            with session.phase("connect"):
                try:
                    self._unused = session.engine.compile(self._store, manifest, self._settings)
                except WeightSyncError as error:
                    session.fail(error)
                    refused = error if isinstance(error, SourceError) else refused
        if refused is not None and not self._live():
            raise refused
        self._progress("connected", {"engines": len(self._live()), "bytes": sum(s.engine.planned for s in self._live())})

    def _open(self, pool: ThreadPoolExecutor, sessions: Sequence[_Session]) -> None:
        for session in list(sessions):
            if session.engine.planned == 0:
                session.fail("no bytes to write: the source has no tensors for this engine", Failure.SOURCE)
        # Staging memory and connections first: what fails there must not pause an engine.
        alive = [session for session in sessions if not session.error]
        if not alive:
            return
        self._ring = self._make_ring(
            [s.engine for s in alive], max(r.program.largest_packed() for s in alive for r in s.engine.ranks.values())
        )
        self._connect_peers(alive)

        def open_engine(session: _Session) -> None:
            try:
                session.open(self._cancelled)
            except Exception as error:  # whatever it is, it is this engine's and not the others'
                session.fail(error)
                session.back_out()  # the others take their time; this one can serve

        self._side_by_side(pool, [session for session in alive if not session.error], open_engine)
        self._connect_peers(self._live())  # sessions that changed since
        self._progress("opened", {"engines": len(self._live())})

    def _connect_peers(self, sessions: Sequence[_Session]) -> None:
        for session in sessions:
            if not session.error:
                try:
                    session.engine.open_connections(self._transport, self._settings)
                except WeightSyncError as error:
                    session.fail(error)

    def _write(self, pool: ThreadPoolExecutor) -> None:
        """Stream to all open engines; each is finished as soon as its own bytes are there."""
        finishing: list[Future[None]] = []
        for number in range(self._passes):
            last = number == self._passes - 1
            sessions = self._live()
            if not sessions:
                break
            stream = self._stream(sessions, pool, finishing, last)
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()  # the trainer may have filled the tensors on a stream of its own
            began = time.monotonic()
            try:
                stream.run(self._source.manifest(), self._source.tensors())
            except BaseException as error:
                stream.abandon(f"the update stopped: {type(error).__name__}: {error}")
                raise
            finally:
                with _signals_deferred():
                    self._collect(stream, began)
            self._wait_for(finishing)
            if not last:
                self._side_by_side(pool, self._live(), self._snapshot_and_reset)
                for session in self._live():
                    session.stage = _Stage.OPEN

    def _stream(self, sessions: Sequence[_Session], pool: ThreadPoolExecutor, finishing: list[Future[None]], last: bool) -> Stream:
        limits = StreamLimits(
            batch_bytes=self._settings.batch_bytes,
            batch_count=self._settings.batch_count,
            in_flight=self._settings.in_flight,
            write_seconds=self._settings.timeouts.write,
            slowest_rate=self._settings.timeouts.slowest_rate,
            held_bytes=float("inf") if getattr(self._source, "keeps_tensors", False) else max(self._settings.buffer_size, 64 << 20),
        )
        owners: dict[int, _Session] = {}
        began = time.monotonic()
        for session in sessions:
            connections = session.engine.open_connections(self._transport, self._settings)
            session.targets = [
                Target(session.engine.name, table, connections[key], session.engine.ranks[key], limits, session.forbidden)
                for table in session.engine.tables
                for key in [(table.role, table.placement.rank)]
            ]
            session.pending = {id(target) for target in session.targets}
            owners.update({id(target): session for target in session.targets})

        def finished(target: Target) -> None:
            session = owners[id(target)]
            session.pending.discard(id(target))
            session.posted = session.posted or any(t.posted for t in session.targets)
            if target.error:
                session.fail(f"{target.table.label}: {target.error}", _failure_of(target))
            elif not session.pending and not session.error:
                session.seconds["write"] = session.seconds.get("write", 0.0) + time.monotonic() - began
                session.stage = _Stage.WRITTEN
                self._progress("written", {"engine": session.engine.name, "bytes": sum(t.written for t in session.targets)})
                finishing.append(pool.submit(self._finish, session, stream, last))

        stream = Stream(
            [target for session in sessions for target in session.targets],
            self._ring,
            self._memory,
            limits,
            digests=self._settings.verify is Verify.DIGEST,
            rate=self.rate,
            finished=finished,
            moved=lambda nbytes: self._progress("moved", {"bytes": nbytes, "of": sum(target.planned for target in stream.targets)}),
        )
        return stream

    def _finish(self, session: _Session, stream: Stream, last: bool) -> None:
        try:
            limits = self._settings.timeouts
            engine = session.engine
            if self._settings.verify is Verify.DIGEST and not engine.stock:
                with session.phase("verify"):
                    deadline = Deadline.after(limits.verify, "comparing digests")
                    verify.verify_digests(engine.client, engine.tables, engine.ranks, stream.sums, deadline)
            session.require_unchanged()
            session.finish()
            if self._settings.verify is Verify.DIGEST and engine.stock:
                with session.phase("verify"):
                    deadline = Deadline.after(limits.verify, "comparing checksums")
                    # sglang hashes with another function on a GPU, so the same values are made there.
                    device = torch.device(engine.tables[0].sessions[self._settings.transport].memory)
                    verify.verify_checksums(engine.client, engine.tables, engine.ranks, self._source.tensors(), device, deadline)
            if not last:
                return
            if self._settings.verify is Verify.SNAPSHOT:
                with session.phase("verify"):
                    verify.compare_with_snapshot(engine.client, engine.ranks, Deadline.after(limits.verify, "comparing with the snapshot"))
            session.publish()
            self._progress("ready", {"engine": engine.name})
        except Exception as error:  # whatever it is, it is this engine's and not the others'
            session.fail(error)

    def _snapshot_and_reset(self, session: _Session) -> None:
        limits = self._settings.timeouts
        client = session.engine.client
        skip = verify.snapshot_exclusions(session.engine.ranks.values())
        with session.phase("verify"):
            client.check_weights("snapshot", Deadline.after(limits.verify, "taking the snapshot"), skip)
            if not client.begin(Deadline.after(limits.begin, "beginning the second pass")):
                raise EngineRefused(f"{session.engine.name}: another session was opened between two passes")
            client.check_weights("reset_tensors", Deadline.after(limits.verify, "randomising"), skip)
            before = session.engine.generation
            session.read_tables()
            if session.engine.generation != before:
                raise EngineRefused(f"{session.engine.name} restarted between two passes")

    def _collect(self, stream: Stream, began: float) -> None:
        """Take over what a pass did, whether or not it ended well."""
        for session in self._sessions:
            session.posted = session.posted or any(target.posted for target in session.targets)
        self._direct += stream.direct_bytes
        self._packed += stream.packed_bytes
        stream.settle(1.0)
        spent = time.monotonic() - began
        for session in self._sessions:
            session.written += sum(target.written for target in session.targets)
            for target in session.targets:
                if target.error:
                    session.fail(f"{target.table.label}: {target.error}", _failure_of(target))
                if target.hung:
                    session.engine.stuck.append(target.still_flying)
                elif not target.error and spent > 0:
                    self.rate = max(self.rate or 0.0, target.written / spent)
            if session.error and session.posted and not session.engine.stuck:
                session.engine.drop_connections()
            session.targets = []
        self._ring.sweep()
        self._memory.release(keep_living=getattr(self._source, "keeps_tensors", False))

    def _side_by_side(self, pool: ThreadPoolExecutor, sessions: Sequence[_Session], call: Callable[[_Session], None]) -> None:
        """Run a step for every engine at once; an engine whose step fails drops out."""

        def guarded(session: _Session) -> None:
            try:
                call(session)
            except Exception as error:  # whatever it is, it is this engine's and not the others'
                session.fail(error)

        self._wait_for([pool.submit(guarded, session) for session in sessions])

    def _wait_for(self, futures: Sequence[Future[None]]) -> None:
        """Wait; short waits keep the main thread open for signals."""
        left: Sequence[Future[None]] = futures
        while left:
            _, undone = wait(left, timeout=0.2)
            left = list(undone)
        for future in futures:
            future.result()

    def _renew_leases(self) -> None:
        """Side by side, so that an engine that does not answer delays no other's renewal."""
        renewers = ThreadPoolExecutor(max_workers=len(self._sessions), thread_name_prefix="weightsync-renew")
        renewing: dict[str, Future[None]] = {}
        while not self._over.wait(LEASE_SECONDS / 3):
            for session in self._sessions:
                name = session.engine.name
                ours = _Stage.LEASED <= session.stage < _Stage.READY and session.outcome is None
                if ours and (name not in renewing or renewing[name].done()):
                    renewing[name] = renewers.submit(session.renew_lease)
        renewers.shutdown(wait=False, cancel_futures=True)

    def _back_out(self, pool: ThreadPoolExecutor) -> dict[str, EngineState]:
        """Every engine that was touched ends Ready, resumed or fenced, whatever brought us here."""
        pool.shutdown(wait=False, cancel_futures=True)
        until = time.monotonic() + GRACE_SECONDS
        for thread in list(pool._threads):
            thread.join(max(until - time.monotonic(), 0.0))
        cleaners = ThreadPoolExecutor(max_workers=max(len(self._sessions), 1), thread_name_prefix="weightsync-back-out")
        for session in self._sessions:
            if session.stage is not _Stage.READY and not session.error:
                session.fail("the update was interrupted", Failure.INTERRUPTED)
        futures = {session.engine.name: cleaners.submit(session.back_out) for session in self._sessions}
        states = {name: future.result() for name, future in futures.items()}
        cleaners.shutdown(wait=False)
        return states

    def _report(self, states: Mapping[str, EngineState], seconds: float) -> UpdateReport:
        engines = {}
        for session in self._sessions:
            state = states[session.engine.name]
            engines[session.engine.name] = EngineReport(
                engine=session.engine.name,
                state=state,
                planned_bytes=session.engine.planned * self._passes,
                written_bytes=session.written,
                targets=len(session.engine.tables),
                seconds=dict(session.seconds),
                transport=session.engine.via or self._settings.transport,
                error=session.error if state is not EngineState.READY else "",
                failure=session.failure if state is not EngineState.READY else None,
                version=self._version if state is EngineState.READY else "",
                notes=session.engine.notes,
            )
        return UpdateReport(
            version=self._version,
            engines=engines,
            seconds=seconds,
            direct_bytes=self._direct,
            packed_bytes=self._packed,
            registrations=self._memory.registered + (self._ring.registered if hasattr(self, "_ring") else 0),
            unused=self._unused,
        )


def _go_on_unless(cancelled: threading.Event) -> None:
    """A step that took long must not go on with the next one behind the back of an update that was given up."""
    if cancelled.is_set():
        raise EngineRefused("the update was cancelled")


def _failure_of(target: Target) -> Failure:
    return Failure.DEADLINE if target.hung else Failure.TRANSPORT


def _harmless(progress: Progress) -> Progress:
    """A display that breaks (a closed pipe) is told nothing more; it never breaks an update."""
    broken = threading.Event()

    def tell(event: str, fields: Mapping[str, Any]) -> None:
        if not broken.is_set():
            try:
                progress(event, fields)
            except Exception as error:  # whatever a caller's display raises
                broken.set()
                log.warning("progress is not shown any more: %s: %s", type(error).__name__, error)

    return tell


@contextlib.contextmanager
def _terminations_raise() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind this update as an interrupt does, where nobody else handles them.

    Python delivers signals to the main thread only: an update that runs in another thread ends with the process.
    """

    def handler(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ours = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def _signals_deferred() -> Iterator[None]:
    """Hold signals back while engines are being resumed; deliver them afterwards."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for number in before:
        signal.signal(number, lambda number, frame: caught.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if caught:
            signal.raise_signal(caught[0])


def device_for(engines: Sequence[Engine], transport: Transport, settings: SenderSettings) -> torch.device:
    """Where packed bytes should lie for these engines."""
    wish = any(transport.stages_on(table.sessions[settings.transport]) for engine in engines for table in engine.tables)
    return torch.device("cuda", torch.cuda.current_device()) if wish and torch.cuda.is_available() else torch.device("cpu")
