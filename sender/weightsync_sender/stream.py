"""One pass of a source's tensors into engine memory.

In: compiled programs with the targets that share each, connections, staging memory. Out: for each target the bytes that
the transport reported as written, or why not. Every distinct piece is produced once and written to all targets that
share it. A target that fails or hangs drops out; the others go on.

One thread does all of it; it waits only for staging memory, never for one target in particular.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from weightsync_core.digest import lane_sums
from weightsync_core.errors import SourceError, TransportError, listing
from weightsync_core.tables import ParameterTable
from weightsync_sender.replica.compiled import CompiledRank
from weightsync_sender.replica.execute import run_opaque, run_unit
from weightsync_sender.replica.program import OpaqueGroup, Unit
from weightsync_sender.sources import TensorMeta, meta_of, require_plain
from weightsync_sender.staging import Ring, Slot, SourceMemory, memory_of
from weightsync_sender.transports import Connection, Memory, Piece, Write, WriteState

log = logging.getLogger(__name__)

_DESCRIPTOR_SECONDS = 4.5e-6
"""What one descriptor costs a transport (measured: NIXL on H200s, 20,480 pieces)."""
_COPY_RATE = {"cpu": 4e9, "cuda": 1e12}
"""Bytes per second at which staging memory is packed; a source whose registration takes longer than that is packed."""
_FIRST_RATE = 2e9
"""Bytes per second of a link that was not measured yet."""
_PATIENCE_SECONDS = 0.5
"""Waiting for a free slot longer than this makes another one, within the ring's bound."""
_POLL_SECONDS = 0.0001
_TELL_SECONDS = 0.1


Sums = dict[str, dict[str, list[int]]]
"""Compiled key -> parameter -> [lane, lane, bytes] (:mod:`weightsync_core.digest`)."""


@dataclass(frozen=True, kw_only=True)
class StreamLimits:
    """Bounds of one pass; see :class:`weightsync_sender.settings.SenderSettings` for their meaning."""

    batch_bytes: int
    batch_count: int
    in_flight: int
    write_seconds: float
    slowest_rate: float
    held_bytes: float
    """Bytes of handed-out tensors that may be kept for writes under way before the source is asked for more."""


@dataclass(eq=False)
class _Batch:
    memory: Memory
    pieces: list[Piece] = field(default_factory=list)
    nbytes: int = 0
    over: list[Callable[[], None]] = field(default_factory=list)
    slots: list[Slot] = field(default_factory=list)
    tail: tuple[Slot | None, str] = (None, "")
    """Slot and parameter of the last piece."""
    deadline: float = 0.0
    write: Write | None = None


class Target:
    """One (engine, role, rank) during a pass."""

    def __init__(
        self,
        engine: str,
        table: ParameterTable,
        connection: Connection,
        rank: CompiledRank,
        limits: StreamLimits,
        forbidden: Callable[[], str] = lambda: "",
        pieces: tuple[Unit | OpaqueGroup, ...] | None = None,
    ) -> None:
        """Take part in a pass.

        Args:
            engine: the engine's id.
            table: where its parameters lie.
            connection: how they are reached.
            rank: what fills them.
            limits: bounds of the pass.
            forbidden: asked right before every write; a text ends this target's part.
            pieces: what of its program this sender writes; default all.
        """
        self.pieces: tuple[Unit | OpaqueGroup, ...] = (*rank.program.units, *rank.program.opaque) if pieces is None else pieces
        self.planned = rank.program.written_by(self.pieces)
        """Bytes that this target must get from here."""
        self.engine, self.table, self.rank = engine, table, rank
        self._forbidden = forbidden
        self.written = 0
        self.error = ""
        self.posted = False
        """Whether a byte may have reached the engine."""
        self.finished_at = 0.0
        self._connection, self._limits = connection, limits
        self._open: _Batch | None = None
        self._waiting: deque[_Batch] = deque()
        self._flying: list[_Batch] = []

    @property
    def idle(self) -> bool:
        """Whether nothing waits or is under way."""
        return self._open is None and not self._waiting and not self._flying

    @property
    def hung(self) -> bool:
        """Whether writes are under way that were given up on."""
        return bool(self.error) and bool(self._flying)

    def still_flying(self) -> bool:
        """Whether a write is still under way."""
        self.poll()
        return bool(self._flying)

    def add(
        self, source: int, parameter: str, offset: int, length: int, memory: Memory, over: Callable[[], None], slot: Slot | None
    ) -> None:
        """Queue one run; ``over`` is called when no write reads it any more."""
        if self.error:
            over()
            return
        batch = self._open
        if batch is not None and batch.memory != memory:
            self.flush()
            batch = None
        if batch is None:
            batch = self._open = _Batch(memory)
        target = self.table.entries[parameter].address + offset
        last = batch.pieces[-1] if batch.pieces else None
        # Neighbours become one piece only within one slot and one parameter: a piece must not cross registered regions.
        joins = slot is not None and batch.tail == (slot, parameter)
        batch.tail = (slot, parameter)
        if last and joins and last.source + last.length == source and last.target + last.length == target:
            batch.pieces[-1] = Piece(last.source, last.target, last.length + length)
        else:
            batch.pieces.append(Piece(source, target, length))
        batch.nbytes += length
        batch.over.append(over)
        if slot is not None and slot not in batch.slots:
            batch.slots.append(slot)
        if batch.nbytes >= self._limits.batch_bytes or len(batch.pieces) >= self._limits.batch_count:
            self.flush()

    def flush(self) -> None:
        """Let what was queued go out."""
        if self._open is not None:
            self._waiting.append(self._open)
            self._open = None
        self.poll()

    def poll(self) -> None:
        """See which writes are over, post what waits."""
        for batch in list(self._flying):
            assert batch.write is not None
            state = batch.write.poll()
            if state is WriteState.PENDING:
                if not self.error and time.monotonic() > batch.deadline:
                    self.fail(
                        f"a write of {batch.nbytes} bytes was not over in its time; the peer hangs or the link is slower than expected"
                    )
                continue
            self._flying.remove(batch)
            self._done(batch)
            if state is WriteState.FAILED:
                self.fail(batch.write.error)
            elif not self.error:
                self.written += batch.nbytes
        while self._waiting and len(self._flying) < self._limits.in_flight and not self.error:
            if why := self._forbidden():
                self.fail(why)
                return
            batch = self._waiting.popleft()
            ahead = sum(other.nbytes for other in self._flying) + batch.nbytes
            batch.deadline = time.monotonic() + self._limits.write_seconds + ahead / self._limits.slowest_rate
            self.posted = True
            if batch.memory.device is not None:  # what fills the memory must be over before the card reads it
                torch.cuda.current_stream(batch.memory.device).synchronize()
            try:
                batch.write = self._connection.post(batch.pieces, batch.memory)
            except TransportError as error:
                self._done(batch)
                self.fail(str(error))
                return
            self._flying.append(batch)

    def fail(self, why: str) -> None:
        """Drop out: nothing more is posted; what is under way is waited for elsewhere."""
        if self.error:
            return
        self.error = why
        log.warning("write failed engine=%s target=%r error=%r", self.engine, self.table.label, why)
        dropped = [*self._waiting, *([self._open] if self._open else [])]
        self._waiting.clear()
        self._open = None
        for batch in dropped:
            self._done(batch)

    def held_slots(self) -> list[Slot]:
        """Slots that writes under way still read."""
        return [slot for batch in self._flying for slot in batch.slots]

    def _done(self, batch: _Batch) -> None:
        for over in batch.over:
            over()
        batch.over.clear()


@dataclass
class _Group:
    """Targets that share one compiled rank, and what of it was not yet produced."""

    rank: CompiledRank
    targets: list[Target]
    pieces: tuple[Unit | OpaqueGroup, ...]
    missing: list[set[str]]
    """For each piece, the HF tensors that it still waits for."""
    waiting: dict[str, list[int]]
    """HF tensor -> pieces that take it."""

    @staticmethod
    def of(targets: list[Target]) -> _Group:
        pieces = targets[0].pieces
        waiting: dict[str, list[int]] = defaultdict(list)
        for index, piece in enumerate(pieces):
            for name in piece.inputs:
                waiting[name].append(index)
        return _Group(targets[0].rank, targets, pieces, [set(piece.inputs) for piece in pieces], dict(waiting))


class Stream:
    """Streams a source once."""

    def __init__(
        self,
        targets: Sequence[Target],
        ring: Ring,
        memory: SourceMemory,
        limits: StreamLimits,
        *,
        digests: bool,
        rate: float | None,
        finished: Callable[[Target], None],
        moved: Callable[[int], None],
    ) -> None:
        """Prepare a pass.

        Args:
            digests: also sum up what each parameter should hold.
            rate: bytes per second of the link as last measured; decides which runs are too short to go directly.
            finished: called once for each target, when all its bytes are written or it has failed.
            moved: called now and then with the bytes written so far, over all targets.
        """
        self.targets = list(targets)
        self.direct_bytes = 0
        self.packed_bytes = 0
        self.sums: Sums = {}
        self._digests, self._finished, self._moved = digests, finished, moved
        self._ring, self._memory, self._limits = ring, memory, limits
        self._shortest_direct = _DESCRIPTOR_SECONDS * (rate or _FIRST_RATE)
        self._slot: Slot | None = None
        self._last: tuple[str, str, int] | None = None
        self._held: dict[str, torch.Tensor] = {}
        self._repacked: set[str] = set()
        """Tensors that are not written from where they lie."""
        self._reported: set[int] = set()
        self._told = 0.0
        by_rank: dict[str, list[Target]] = defaultdict(list)
        for target in targets:
            by_rank[target.rank.key].append(target)
        self._groups = [_Group.of(group) for group in by_rank.values()]
        self._uses: dict[str, int] = defaultdict(int)
        for group in self._groups:
            for name, indexes in group.waiting.items():
                self._uses[name] += len(indexes)

    def run(self, manifest: Mapping[str, TensorMeta], tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Write everything and wait until every write is over, or its target has failed.

        Raises:
            SourceError: the source hands out other tensors than it stated. Targets that got bytes are then incomplete.
        """
        for group in self._groups:
            for index, names in enumerate(group.missing):
                if not names:  # padding, which needs no tensor
                    self._produce(group, index)
        seen: set[str] = set()
        for name, tensor in _checked(manifest, tensors, seen):
            if all(target.error for target in self.targets):
                return
            self._arrived(name, tensor)
            self._poll()
            self._let_go()
        absent = [name for name in manifest if name not in seen]
        if absent:
            raise SourceError(
                f"the source stated {len(manifest)} tensors and handed out {len(seen)}; missing {listing(absent)}", names=absent
            )
        self._drain()

    def _let_go(self) -> None:
        """Wait until no more is held for writes under way than the limit; what hung writes hold does not count."""
        if self._memory.held_bytes <= self._limits.held_bytes:
            return
        for target in self.targets:
            target.flush()
        while self._memory.held_bytes > self._limits.held_bytes:
            busy = [target for target in self.targets if not target.error and not target.idle]
            self._wait()
            self._memory.release(keep_living=False)
            if not busy:
                return

    def abandon(self, why: str) -> None:
        """Fail every target that is not complete: the pass cannot go on."""
        for target in self.targets:
            if id(target) not in self._reported:
                target.fail(why)

    def settle(self, seconds: float) -> None:
        """Wait a moment for writes that were given up on, then take their slots out of the ring."""
        self._close_slot()
        until = time.monotonic() + seconds
        while any(target.hung for target in self.targets) and time.monotonic() < until:
            self._wait()
        self._replace_hung_slots()
        self._held.clear()

    def _drain(self) -> None:
        self._close_slot()
        for target in self.targets:
            target.flush()
        while not all(target.error or target.idle for target in self.targets):
            self._report()
            self._wait()
        self._report()

    def _report(self) -> None:
        for target in self.targets:
            if (target.idle or target.error) and id(target) not in self._reported:
                if not target.error and target.written != target.planned:
                    target.fail(f"{target.written} of {target.planned} planned bytes were written")
                self._reported.add(id(target))
                target.finished_at = time.monotonic()
                self._finished(target)

    def _arrived(self, name: str, tensor: torch.Tensor) -> None:
        if not self._uses.get(name):
            return
        if not tensor.is_contiguous():
            tensor = tensor.contiguous()
            self._repacked.add(name)  # a copy of ours, which can go as soon as it is packed
        self._held[name] = tensor
        for group in self._groups:
            for index in group.waiting.get(name, ()):
                group.missing[index].discard(name)
                if not group.missing[index]:
                    self._produce(group, index)

    def _produce(self, group: _Group, index: int) -> None:
        piece = group.pieces[index]
        targets = [target for target in group.targets if not target.error]
        if targets:
            if isinstance(piece, OpaqueGroup):
                self._produce_opaque(group, piece, targets)
            else:
                self._produce_unit(group, piece, targets)
        for name in piece.inputs:
            self._uses[name] -= 1
            if self._uses[name] == 0:
                self._held.pop(name, None)

    def _produce_unit(self, group: _Group, unit: Unit, targets: Sequence[Target]) -> None:
        if unit.direct is not None and unit.nbytes >= self._shortest_direct:
            name, offset = unit.direct
            tensor = self._held[name]
            copying = tensor.untyped_storage().nbytes() / _COPY_RATE[self._ring.device.type]
            here = tensor.device.type == self._ring.device.type and name not in self._repacked
            if here and self._memory.cost(tensor) <= copying and self._registers(name, tensor):
                self._sum(group, unit.parameter, unit.runs, _raw(tensor)[offset : offset + unit.nbytes], unit.offset)
                self.direct_bytes += unit.nbytes * len(targets)
                for target in targets:
                    over = self._memory.hold(tensor)
                    target.add(tensor.data_ptr() + offset, unit.parameter, unit.offset, unit.nbytes, memory_of(tensor), over, None)
                return
        adjoining = self._last == (group.rank.key, unit.parameter, unit.offset)
        slot, out = self._pack(unit.nbytes, adjoining)
        run_unit(unit, self._held, out, group.rank.program.temporaries)
        self._last = (group.rank.key, unit.parameter, unit.offset + unit.nbytes)
        self._send(group, unit.parameter, unit.runs, out, unit.offset, slot, targets)

    def _registers(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether the tensor's memory can be registered; one that cannot (memlock, the card's limits) is packed."""
        try:
            self._memory.hold(tensor)()
        except TransportError as error:
            log.warning("packed instead of written directly tensor=%s error=%r", name, str(error))
            self._repacked.add(name)
            return False
        return True

    def _produce_opaque(self, group: _Group, opaque: OpaqueGroup, targets: Sequence[Target]) -> None:
        sizes = {name: group.rank.program.parameters[name].nbytes for name in opaque.parameters}
        outs = {name: torch.empty(size, dtype=torch.uint8, device=self._ring.device) for name, size in sizes.items()}
        run_opaque(group.rank.replica, opaque, self._held, outs)
        for name, filled in outs.items():
            slot, out = self._pack(sizes[name], adjoining=False)
            out.copy_(filled)
            self._send(group, name, ((0, sizes[name]),), out, 0, slot, targets)

    def _send(
        self,
        group: _Group,
        parameter: str,
        runs: Sequence[tuple[int, int]],
        out: torch.Tensor,
        base: int,
        slot: Slot,
        targets: Sequence[Target],
    ) -> None:
        """Queue packed bytes; ``out[0]`` is the parameter's byte ``base``."""
        self._sum(group, parameter, runs, out, base)
        for target in targets:
            for start, length in runs:
                slot.readers += 1
                self.packed_bytes += length
                target.add(out.data_ptr() + start - base, parameter, start, length, memory_of(out), slot.release, slot)

    def _sum(self, group: _Group, parameter: str, runs: Sequence[tuple[int, int]], raw: torch.Tensor, base: int) -> None:
        if not self._digests:
            return
        total = self.sums.setdefault(group.rank.key, {}).setdefault(parameter, [0, 0, 0])
        for lane, value in enumerate(lane_sums(raw, runs, torch, base)):
            total[lane] += value

    def _pack(self, nbytes: int, adjoining: bool) -> tuple[Slot, torch.Tensor]:
        """Room for ``nbytes`` in the current slot, or in the next."""
        if self._slot is not None:
            out = self._slot.take(nbytes, adjoining=adjoining)
            if out is not None:
                return self._slot, out
            self._close_slot()
        self._slot = self._next_slot()
        out = self._slot.take(nbytes)
        if out is None:
            raise TransportError(f"a block of {nbytes} bytes does not fit a slot of {self._ring.capacity}; the ring was made too small")
        return self._slot, out

    def _close_slot(self) -> None:
        """Let the current slot go out; it is free when its last write is over."""
        if self._slot is not None:
            for target in self.targets:
                target.flush()
            self._slot.release()
            self._slot = None
        self._last = None

    def _next_slot(self) -> Slot:
        asked = time.monotonic()
        while (slot := self._ring.acquire()) is None:
            self._wait()
            self._replace_hung_slots()
            if time.monotonic() - asked > _PATIENCE_SECONDS and self._ring.extend():
                asked = time.monotonic()  # one slow engine must not hold up the others
            if self._ring.exhausted:
                raise TransportError("hung writes hold all of the staging memory, and no more can be registered")
        slot.readers += 1  # this packer
        return slot

    def _replace_hung_slots(self) -> None:
        for target in self.targets:
            if target.hung:
                for slot in target.held_slots():
                    self._ring.give_up(slot)

    def _poll(self) -> None:
        for target in self.targets:
            target.poll()
        now = time.monotonic()
        if now - self._told > _TELL_SECONDS:
            self._told = now
            self._moved(sum(target.written for target in self.targets))

    def _wait(self) -> None:
        self._poll()
        time.sleep(_POLL_SECONDS)


def _checked(
    manifest: Mapping[str, TensorMeta], tensors: Iterable[tuple[str, torch.Tensor]], seen: set[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in tensors:
        if name not in manifest or name in seen:
            what = "twice" if name in seen else "without having stated it"
            raise SourceError(f"the source handed out tensor {name!r} {what}", names=[name])
        require_plain(name, tensor)
        if meta_of(tensor) != manifest[name]:
            raise SourceError(
                f"tensor {name!r} is {list(tensor.shape)} {tensor.dtype}, its source stated {list(manifest[name].shape)} "
                f"{manifest[name].dtype}",
                names=[name],
            )
        seen.add(name)
        yield name, tensor


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
