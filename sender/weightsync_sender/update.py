"""The order of one update over all engines.

Engines go through their control calls side by side, each with its own deadlines (:mod:`weightsync_sender.engine_update`); one
that fails drops out and the others finish. Whatever ends an update, every engine that was touched is backed out of.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait

import torch

from weightsync_core.errors import EngineRefused, SourceError, WeightSyncError
from weightsync_sender import verify
from weightsync_sender.background import Background
from weightsync_sender.engine import ConfigFolders, Engine
from weightsync_sender.engine_client import Deadline
from weightsync_sender.engine_update import LEASE_SECONDS, EngineUpdate, Stage
from weightsync_sender.progress import Progress, harmless
from weightsync_sender.replica.compiled import ReplicaStore
from weightsync_sender.report import EngineReport, EngineState, Failure, UpdateReport
from weightsync_sender.settings import SenderSettings, Verify
from weightsync_sender.signals import signals_deferred, terminations_raise
from weightsync_sender.sources import Source
from weightsync_sender.staging import Ring, SourceMemory
from weightsync_sender.stream import Stream, StreamLimits, Target
from weightsync_sender.transports import Transport

GRACE_SECONDS = 15.0
"""How long an interrupted update waits for control calls under way before it backs out."""


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
        self._progress = harmless(progress)
        self.rate = rate
        """Bytes per second to one target, the best that was measured."""
        owner = uuid.uuid4().hex
        self._sessions = [EngineUpdate(engine, settings, owner, version, transport, self._progress) for engine in engines]
        self._calls = Background("weightsync-control")
        """Control calls that change an engine."""
        self._cancelled = threading.Event()
        self._over = threading.Event()
        self._direct = self._packed = 0
        self._passes = 2 if settings.verify is Verify.SNAPSHOT else 1
        self._unused: tuple[str, ...] = ()

    def run(self) -> UpdateReport:
        """Do it. Engines' failures are in the report; the source's and the user's interrupts are raised after backing out."""
        started = time.monotonic()
        states: dict[str, EngineState] = {}
        with terminations_raise():
            try:
                self._connect()
                ready = self._live()
                if ready:
                    threading.Thread(target=self._renew_leases, name="weightsync-lease", daemon=True).start()
                    self._open(ready)
                    self._write()
            finally:
                with signals_deferred():
                    self._cancelled.set()
                    self._over.set()
                    states = self._back_out()
        return self._report(states, time.monotonic() - started)

    def _live(self) -> list[EngineUpdate]:
        return [session for session in self._sessions if not session.error]

    def _connect(self) -> None:
        limits = self._settings.timeouts

        def connect(session: EngineUpdate) -> None:
            with session.phase("connect"):
                if session.engine.still_stuck():
                    raise EngineRefused(f"{session.engine.name}: a write of an earlier update is still under way and could land later")
                deadline = Deadline.after(limits.connect, "connecting")
                session.engine.connect(self._settings, self._transport.protocol, self._folders, deadline)

        self._progress("connecting", {"engines": len(self._sessions)})
        # Not among the calls that are waited for when an update is interrupted: connecting changes nothing.
        self._side_by_side(self._sessions, connect, Background("weightsync-connect"))
        if self._live():
            self._progress("preparing", {"engines": len(self._live())})
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
        if self._live():
            self._progress("connected", {"engines": len(self._live()), "bytes": sum(s.engine.planned for s in self._live())})

    def _open(self, sessions: Sequence[EngineUpdate]) -> None:
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

        def open_engine(session: EngineUpdate) -> None:
            try:
                session.open(self._cancelled)
            except Exception as error:  # whatever it is, it is this engine's and not the others'
                session.fail(error)
                session.back_out()  # the others take their time; this one can serve

        self._side_by_side([session for session in alive if not session.error], open_engine)
        self._connect_peers(self._live())  # sessions that changed since
        self._progress("opened", {"engines": len(self._live())})

    def _connect_peers(self, sessions: Sequence[EngineUpdate]) -> None:
        for session in sessions:
            if not session.error:
                try:
                    session.engine.open_connections(self._transport, self._settings)
                except WeightSyncError as error:
                    session.fail(error)

    def _write(self) -> None:
        """Stream to all open engines; each is finished as soon as its own bytes are there."""
        finishing: list[Future[None]] = []
        for number in range(self._passes):
            last = number == self._passes - 1
            sessions = self._live()
            if not sessions:
                break
            stream = self._stream(sessions, finishing, last)
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()  # the trainer may have filled the tensors on a stream of its own
            began = time.monotonic()
            try:
                stream.run(self._source.manifest(), self._source.tensors())
            except BaseException as error:
                stream.abandon(f"the update stopped: {type(error).__name__}: {error}")
                raise
            finally:
                with signals_deferred():
                    self._collect(stream, began)
            self._wait_for(finishing)
            if not last:
                self._side_by_side(self._live(), self._snapshot_and_reset)
                for session in self._live():
                    session.stage = Stage.OPEN

    def _stream(self, sessions: Sequence[EngineUpdate], finishing: list[Future[None]], last: bool) -> Stream:
        limits = StreamLimits(
            batch_bytes=self._settings.batch_bytes,
            batch_count=self._settings.batch_count,
            in_flight=self._settings.in_flight,
            write_seconds=self._settings.timeouts.write,
            slowest_rate=self._settings.timeouts.slowest_rate,
            held_bytes=float("inf") if getattr(self._source, "keeps_tensors", False) else max(self._settings.buffer_size, 64 << 20),
        )
        owners: dict[int, EngineUpdate] = {}
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
                session.stage = Stage.WRITTEN
                self._progress("written", {"engine": session.engine.name, "bytes": sum(t.written for t in session.targets)})
                finishing.append(self._calls.submit(self._finish, session, stream, last))

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

    def _finish(self, session: EngineUpdate, stream: Stream, last: bool) -> None:
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

    def _snapshot_and_reset(self, session: EngineUpdate) -> None:
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

    def _side_by_side(
        self, sessions: Sequence[EngineUpdate], call: Callable[[EngineUpdate], None], calls: Background | None = None
    ) -> None:
        """Run a step for every engine at once; an engine whose step fails drops out."""

        def guarded(session: EngineUpdate) -> None:
            try:
                call(session)
            except Exception as error:  # whatever it is, it is this engine's and not the others'
                session.fail(error)

        self._wait_for([(calls or self._calls).submit(guarded, session) for session in sessions])

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
        renewers = Background("weightsync-renew")
        renewing: dict[str, Future[None]] = {}
        while not self._over.wait(LEASE_SECONDS / 3):
            for session in self._sessions:
                name = session.engine.name
                ours = Stage.LEASED <= session.stage < Stage.READY and session.outcome is None
                if ours and (name not in renewing or renewing[name].done()):
                    renewing[name] = renewers.submit(session.renew_lease)

    def _back_out(self) -> dict[str, EngineState]:
        """Every engine that was touched ends Ready, resumed or fenced, whatever brought us here."""
        self._calls.join(time.monotonic() + GRACE_SECONDS)
        for session in self._sessions:
            if session.stage is not Stage.READY and not session.error:
                session.fail("the update was interrupted", Failure.INTERRUPTED)
        states: dict[str, EngineState] = {}

        def back_out(session: EngineUpdate) -> None:
            states[session.engine.name] = session.back_out()

        self._side_by_side(self._sessions, back_out, Background("weightsync-back-out"))
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


def _failure_of(target: Target) -> Failure:
    return Failure.DEADLINE if target.hung else Failure.TRANSPORT


def device_for(engines: Sequence[Engine], transport: Transport, settings: SenderSettings) -> torch.device:
    """Where packed bytes should lie for these engines."""
    wish = any(transport.stages_on(table.sessions[settings.transport]) for engine in engines for table in engine.tables)
    return torch.device("cuda", torch.cuda.current_device()) if wish and torch.cuda.is_available() else torch.device("cpu")
