"""The order of one update over all engines, by one trainer rank or by several together.

Rank 0 leads: it makes the engines' control calls. All ranks write, each its own share (:mod:`weightsync_sender.division`), and
agree before and after (:mod:`weightsync_sender.party`); an error of one rank is everybody's. Engines go through their control calls
side by side, each with its own deadlines (:mod:`weightsync_sender.engine_update`); one that fails drops out and the others finish.
Whatever ends an update, every engine that was touched is backed out of.
"""

from __future__ import annotations

import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

import torch

from weightsync_core.errors import EngineRefused, SourceError, VerificationError, WeightSyncError, listing
from weightsync_core.planner import TargetId
from weightsync_core.tables import ParameterTable
from weightsync_sender import verify
from weightsync_sender.background import Background
from weightsync_sender.division import Member, Writers, choose_writers, digest_of, divide, groups, require_agreement
from weightsync_sender.engine import ConfigFolders, Engine, TargetKey
from weightsync_sender.engine_client import Deadline
from weightsync_sender.engine_update import LEASE_SECONDS, EngineUpdate, Stage
from weightsync_sender.party import Party, PartyError
from weightsync_sender.progress import Progress, harmless
from weightsync_sender.replica.compiled import ReplicaStore
from weightsync_sender.report import EngineReport, EngineState, Failure, UpdateReport
from weightsync_sender.settings import SenderSettings, Verify
from weightsync_sender.signals import signals_deferred, terminations_raise
from weightsync_sender.sources import Source, is_collective
from weightsync_sender.staging import Ring, SourceMemory
from weightsync_sender.stream import Stream, StreamLimits, Sums, Target
from weightsync_sender.transports import Transport

GRACE_SECONDS = 15.0
"""How long an interrupted update waits for control calls under way before it backs out."""


@dataclass
class _Written:
    """What one trainer rank did to one engine in a pass."""

    error: str = ""
    failure: Failure | None = None
    posted: bool = False
    hung: bool = False
    nbytes: dict[TargetKey, int] = field(default_factory=dict)
    seconds: float = 0.0
    via: str = ""


@dataclass
class _Pass:
    """What one trainer rank did in a pass."""

    group: str
    engines: dict[str, _Written]
    sums: Sums
    direct: int
    packed: int


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
        party: Party,
        writers: Writers,
        rate: float | None,
        progress: Progress,
    ) -> None:
        self._engines, self._source, self._version, self._settings = engines, source, version, settings
        self._transport, self._store, self._memory, self._make_ring, self._folders = transport, store, memory, make_ring, folders
        self._progress = harmless(progress)
        self._party, self._leads = party, party.rank == 0
        self._group = str(getattr(source, "group", ""))
        self.writers = writers
        """Who wrote what in the last update, then in this one."""
        self.rate = rate
        """Bytes per second to one target, the best that was measured."""
        self._sessions = [EngineUpdate(engine, settings, version, transport, self._progress, self._leads) for engine in engines]
        self._calls = Background("weightsync-control")
        """Control calls that change an engine."""
        self._cancelled = threading.Event()
        self._over = threading.Event()
        self._direct = self._packed = 0
        self._passes = 2 if settings.verify is Verify.SNAPSHOT else 1
        self._unused: tuple[str, ...] = ()
        self._ring: Ring | None = None

    def run(self) -> UpdateReport:
        """Do it. Engines' failures are in the report; the source's and the user's interrupts are raised after backing out.

        Raises:
            PartyError: another trainer rank failed, died or did not come.
        """
        started = time.monotonic()
        states: dict[str, EngineState] = {}
        self._party.begin()
        with terminations_raise():
            try:
                self._agree()
                if self._connect():
                    threading.Thread(target=self._renew_leases, name="weightsync-lease", daemon=True).start()
                    self._open()
                    self._write()
            except BaseException as error:
                self._party.fail(str(error) or type(error).__name__)
                raise
            finally:
                with signals_deferred():
                    self._cancelled.set()
                    self._over.set()
                    states = self._back_out()
            report = self._report(states, time.monotonic() - started) if self._leads else None
            told: UpdateReport = self._exchange("the report", report)[0]
            self._party.end()
        return told

    # -- between trainer ranks

    def _exchange(self, what: str, value: Any) -> list[Any]:
        return self._party.exchange(what, value, self._settings.timeouts.ranks)

    def _follow(self, what: str, know: Callable[[EngineUpdate], Any], adopt: Callable[[EngineUpdate, Any], None]) -> bool:
        """Have all ranks take over what the leader knows of each engine, or that it failed; whether any has not failed."""
        own = {s.engine.name: (s.error, s.failure, None if s.error else know(s)) for s in self._sessions} if self._leads else None
        told = self._exchange(what, own)[0]
        if not self._leads:
            for session in self._sessions:
                error, failure, value = told[session.engine.name]
                if error:
                    session.fail(error, failure)
                else:
                    self._guarded(session, adopt, value)
        return any(not error for error, _, _ in told.values())

    def _share_failures(self, what: str) -> bool:
        """An engine that one rank cannot write gets nothing from any; whether any is left."""
        told = self._exchange(what, {session.engine.name: (session.error, session.failure) for session in self._sessions})
        for session in self._sessions:
            for rank, failures in enumerate(told):
                error, failure = failures[session.engine.name]
                if error:
                    session.fail(self._said_by(rank, error), failure)
        return any(not session.error for session in self._sessions)

    def _said_by(self, rank: int, words: str) -> str:
        return words if rank == self._party.rank or self._party.size == 1 else f"trainer rank {rank}: {words}"

    # -- the order

    def _live(self) -> list[EngineUpdate]:
        return [session for session in self._sessions if not session.error]

    def _agree(self) -> None:
        """See that all ranks mean the same update, and learn what each source group hands out."""
        manifest = self._source.manifest()
        together = self._party.size > 1
        member = Member(
            version=self._version,
            engines=tuple(engine.name for engine in self._engines),
            group=self._group,
            node=socket.gethostname(),
            digest=digest_of(manifest) if together else "",
        )
        members = self._exchange("version and engines", member)
        require_agreement(members)
        speakers = groups(members)
        given = self._exchange("tensors", manifest if speakers[self._group] == self._party.rank else None)
        self._division = divide(members, {group: given[rank] for group, rank in speakers.items()})
        owner: str = self._exchange("owner", uuid.uuid4().hex)[0]
        for session in self._sessions:
            session.owner = owner

    def _connect(self) -> bool:
        """Read the engines, choose writers, build programs; whether any engine can be written."""
        limits = self._settings.timeouts

        def connect(session: EngineUpdate) -> None:
            with session.phase("connect"):
                deadline = Deadline.after(limits.connect, "connecting")
                session.engine.connect(self._settings, self._transport.protocol, self._folders, deadline)

        def adopt(session: EngineUpdate, told: tuple[dict[str, Any], list[ParameterTable]]) -> None:
            deadline = Deadline.after(limits.connect, "connecting")
            session.engine.adopt(*told, self._folders, deadline)

        self._progress("connecting", {"engines": len(self._sessions)})
        for session in self._sessions:
            if session.engine.still_stuck():
                session.fail(EngineRefused(f"{session.engine.name}: a write of an earlier update is still under way and could land later"))
        if self._leads:
            # Not among the calls that are waited for when an update is interrupted: connecting changes nothing.
            self._side_by_side(self._live(), connect, Background("weightsync-connect"))
        self._follow("engines", lambda session: (session.engine.info, session.engine.tables), adopt)
        if self._live():
            self._progress("preparing", {"engines": len(self._live())})
        self._choose_writers()
        refused: SourceError | None = None
        for session in self._live():
            with session.phase("connect"):
                try:
                    if session.engine.stock and self._settings.verify is Verify.DIGEST and self._party.size > 1:
                        raise EngineRefused(f"{session.engine.name} has no plugin, and several trainer ranks cannot make its checksums")
                    # The leader proves that nothing is missing or left over; the others need what they write.
                    only = None if self._leads else self._own(session)
                    self._unused = session.engine.compile(self._store, self._division.union, self._settings, only)
                    if self._leads and session.engine.planned == 0:
                        raise SourceError(f"{session.engine.name}: no bytes to write: the source has no tensors for this engine")
                except WeightSyncError as error:
                    session.fail(error)
                    refused = error if isinstance(error, SourceError) else refused
        if not self._share_failures("programs") and refused is not None:
            raise refused
        if self._live():
            self._progress("connected", {"engines": len(self._live()), "bytes": sum(s.engine.planned for s in self._live())})
        return bool(self._live())

    def _choose_writers(self) -> None:
        live = [(s.engine.name, s.engine.layout.key, s.engine.tables) for s in self._live() if s.engine.layout is not None]
        told = self._exchange("writers", choose_writers(self._division, live, self.writers) if self._leads else None)
        self.writers = told[0]

    def _own(self, session: EngineUpdate) -> set[TargetKey]:
        """Targets of an engine that this rank writes."""
        keys = [(table.role, table.placement.rank) for table in session.engine.tables]
        return {key for key in keys if self.writers.get((self._group, TargetId(session.engine.name, *key))) == self._party.rank}

    def _open(self) -> None:
        # Staging memory and connections first: what fails there must not pause an engine.
        self._make_staging()
        self._connect_peers()
        if not self._share_failures("peers"):
            return

        def open_engine(session: EngineUpdate) -> None:
            try:
                session.open(self._cancelled)
            except Exception as error:  # whatever it is, it is this engine's and not the others'
                session.fail(error)
                session.back_out()  # the others take their time; this one can serve

        if self._leads:
            self._side_by_side(self._live(), open_engine)
        self._let_write("opened")
        self._connect_peers()  # sessions that changed since
        self._progress("opened", {"engines": len(self._live())})

    def _let_write(self, what: str) -> bool:
        """From here on every rank writes to the open engines; whether there are any."""
        for session in self._live():
            session.others_write = self._party.size > 1
        try:
            return self._follow(what, lambda session: session.engine.tables, self._join)
        except PartyError as error:
            for session in self._sessions:
                session.others_write = not error.shared
            raise

    def _join(self, session: EngineUpdate, tables: list[ParameterTable]) -> None:
        session.engine.tables = tables
        if self._own(session):
            session.join()

    def _make_staging(self) -> None:
        mine = [(session.engine, session.engine.ranks[key]) for session in self._live() for key in self._own(session)]
        if mine:
            largest = max(rank.program.largest_packed() for _, rank in mine)
            self._ring = self._make_ring(list({id(engine): engine for engine, _ in mine}.values()), largest)

    def _connect_peers(self) -> None:
        for session in self._live():
            try:
                session.engine.open_connections(self._transport, self._settings, self._own(session))
            except WeightSyncError as error:
                session.fail(error)

    def _write(self) -> None:
        """Stream to all open engines. A single rank finishes each as soon as its bytes are there; several compare notes first."""
        together = self._party.size > 1
        for number in range(self._passes):
            last = number == self._passes - 1
            finishing: list[Future[None]] = []
            done = self._pass(finishing, last)
            told = self._exchange("what was written", done)
            for session in self._sessions:
                session.others_write = False
            if self._leads and together:
                sums = self._merge(told)
                finishing = [self._calls.submit(self._finish, session, sums, last) for session in self._live()]
            self._wait_for(finishing)
            if last:
                return
            if self._leads:
                self._side_by_side(self._live(), self._snapshot_and_reset)
            if not self._let_write("the second pass"):
                return
            for session in self._live():
                session.stage = Stage.OPEN

    def _pass(self, finishing: list[Future[None]], last: bool) -> _Pass:
        """Write this rank's share; what it came to."""
        sessions = [session for session in self._live() if self._own(session)]
        tensors = self._source.tensors()
        if not sessions or self._ring is None:
            if is_collective(self._source):
                _go_through(tensors)
            return _Pass(self._group, self._failed(), {}, 0, 0)
        stream = self._stream(sessions, self._ring, finishing, last)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # the trainer may have filled the tensors on a stream of its own
        began = time.monotonic()
        try:
            stream.run(self._source.manifest(), tensors)
            if is_collective(self._source):
                _go_through(tensors)
        except BaseException as error:
            stream.abandon(f"the update stopped: {type(error).__name__}: {error}")
            if isinstance(error, Exception) and is_collective(self._source):
                _go_through(tensors)  # else the other ranks would wait in it; nothing is left of it where it is what failed
            raise
        finally:
            with signals_deferred():
                written = self._collect(stream, self._ring, began)
        return _Pass(self._group, {**self._failed(), **written}, stream.sums, stream.direct_bytes, stream.packed_bytes)

    def _failed(self) -> dict[str, _Written]:
        """Engines that this rank has given up."""
        return {session.engine.name: _Written(session.error, session.failure) for session in self._sessions if session.error}

    def _stream(self, sessions: Sequence[EngineUpdate], ring: Ring, finishing: list[Future[None]], last: bool) -> Stream:
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
            connections = session.engine.open_connections(self._transport, self._settings, self._own(session))
            session.targets = [
                Target(
                    session.engine.name,
                    table,
                    connections[key],
                    session.engine.ranks[key],
                    limits,
                    session.forbidden,
                    self._division.pieces(session.engine.ranks[key].program, self._group),
                )
                for table in session.engine.tables
                for key in [(table.role, table.placement.rank)]
                if key in connections
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
                if self._party.size == 1:
                    session.stage = Stage.WRITTEN
                self._progress("written", {"engine": session.engine.name, "bytes": sum(t.written for t in session.targets)})
                if self._party.size == 1:
                    finishing.append(self._calls.submit(self._finish, session, stream.sums, last))

        stream = Stream(
            [target for session in sessions for target in session.targets],
            ring,
            self._memory,
            limits,
            digests=self._settings.verify is Verify.DIGEST,
            rate=self.rate,
            finished=finished,
            moved=lambda nbytes: self._progress("moved", {"bytes": nbytes, "of": sum(target.planned for target in stream.targets)}),
        )
        return stream

    def _merge(self, passes: Sequence[_Pass]) -> Sums:
        """Prove over all ranks that every target of every engine got all its bytes; returns what its parameters should sum up to."""
        for session in self._live():
            nbytes: dict[TargetKey, int] = dict.fromkeys(session.engine.ranks, 0)
            session.posted = False
            for rank, done in enumerate(passes):
                written = done.engines.get(session.engine.name, _Written())
                session.posted = session.posted or written.posted
                session.hung_elsewhere = session.hung_elsewhere or (written.hung and rank != self._party.rank)
                session.seconds["write"] = max(session.seconds.get("write", 0.0), written.seconds)
                if written.error:
                    session.fail(self._said_by(rank, written.error), written.failure)
                for key, count in written.nbytes.items():
                    nbytes[key] += count
                if rank != self._party.rank:
                    session.written += sum(written.nbytes.values())
                    session.via.add(written.via)
            for (role, rank), count in nbytes.items():
                planned = session.engine.ranks[role, rank].program.written
                if count != planned:
                    words = f"{role} rank {rank}: all trainer ranks together wrote {count} of {planned} planned bytes"
                    session.fail(words, Failure.TRANSPORT)
            if not session.error:
                session.stage = Stage.WRITTEN
        for done in (done for rank, done in enumerate(passes) if rank != self._party.rank):
            self._direct += done.direct
            self._packed += done.packed
        return _merge_sums(passes)

    def _finish(self, session: EngineUpdate, sums: Sums, last: bool) -> None:
        try:
            limits = self._settings.timeouts
            engine = session.engine
            if self._settings.verify is Verify.DIGEST and not engine.stock:
                with session.phase("verify"):
                    deadline = Deadline.after(limits.verify, "comparing digests")
                    verify.verify_digests(engine.client, engine.tables, engine.ranks, sums, deadline)
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

    def _collect(self, stream: Stream, ring: Ring, began: float) -> dict[str, _Written]:
        """Take over what a pass did, whether or not it ended well; by engine."""
        for session in self._sessions:
            session.posted = session.posted or any(target.posted for target in session.targets)
        self._direct += stream.direct_bytes
        self._packed += stream.packed_bytes
        stream.settle(1.0)
        spent = time.monotonic() - began
        written = {}
        for session in self._sessions:
            session.written += sum(target.written for target in session.targets)
            for target in session.targets:
                if target.error:
                    session.fail(f"{target.table.label}: {target.error}", _failure_of(target))
                if target.hung:
                    session.engine.stuck.append(target.still_flying)
                elif not target.error and spent > 0:
                    self.rate = max(self.rate or 0.0, target.written / spent)
            if session.targets:
                written[session.engine.name] = _Written(
                    error=session.error,
                    failure=session.failure,
                    posted=any(target.posted for target in session.targets),
                    hung=bool(session.engine.stuck),
                    nbytes={(t.table.role, t.table.placement.rank): t.written for t in session.targets},
                    seconds=spent,
                    via=session.engine.via,
                )
            if session.error and session.posted and not session.engine.stuck:
                session.engine.drop_connections()
            session.targets = []
        ring.sweep()
        self._memory.release(keep_living=getattr(self._source, "keeps_tensors", False))
        return written

    def _side_by_side(
        self, sessions: Sequence[EngineUpdate], call: Callable[[EngineUpdate], None], calls: Background | None = None
    ) -> None:
        """Run a step for every engine at once; an engine whose step fails drops out."""
        self._wait_for([(calls or self._calls).submit(self._guarded, session, call) for session in sessions])

    @staticmethod
    def _guarded(session: EngineUpdate, call: Callable[..., None], *arguments: Any) -> None:
        try:
            call(session, *arguments)
        except Exception as error:  # whatever it is, it is this engine's and not the others'
            session.fail(error)

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
        if not self._leads:
            for session in self._sessions:
                session.leave()
            return {}
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
                transport=", ".join(sorted({*session.via, session.engine.via} - {""})) or self._settings.transport,
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
            registrations=self._memory.registered + (self._ring.registered if self._ring is not None else 0),
            unused=self._unused,
        )


def _merge_sums(passes: Sequence[_Pass]) -> Sums:
    """Sums of whole parameters from those of each source group.

    Raises:
        VerificationError: two ranks of one source group made different bytes of the same tensors.
    """
    of_group: dict[tuple[str, str], tuple[int, dict[str, list[int]]]] = {}
    for rank, done in enumerate(passes):
        for key, sums in done.sums.items():
            first, known = of_group.setdefault((done.group, key), (rank, sums))
            odd = [name for name, total in sums.items() if known[name] != total]
            if odd:
                raise VerificationError(
                    f"trainer ranks {first} and {rank} hold different weights where they should be equal: {listing(odd)}; no engine was "
                    "resumed with them"
                )
    merged: Sums = {}
    for (_, key), (_, sums) in of_group.items():
        for name, total in sums.items():
            into = merged.setdefault(key, {}).setdefault(name, [0, 0, 0])
            for index, value in enumerate(total):
                into[index] += value
    return merged


def _go_through(tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Take part in what is left of a collective source."""
    for _ in tensors:
        pass


def _failure_of(target: Target) -> Failure:
    return Failure.DEADLINE if target.hung else Failure.TRANSPORT


def device_for(engines: Sequence[Engine], transport: Transport, settings: SenderSettings) -> torch.device:
    """Where packed bytes should lie for these engines."""
    wish = any(transport.stages_on(table.sessions[settings.transport]) for engine in engines for table in engine.tables)
    return torch.device("cuda", torch.cuda.current_device()) if wish and torch.cuda.is_available() else torch.device("cpu")
