"""The stream over a transport into this process: order, slots, and what happens when writes fail or hang."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from types import MappingProxyType
from typing import Any, cast

import pytest
import torch
from loopback import LoopbackConnection, LoopbackTransport, LoopbackWrite

from weightsync_core.digest import digest_text, lane_sums
from weightsync_core.errors import BufferTooSmall, SourceError
from weightsync_core.tables import Identity, ParameterTable, Placement, TensorEntry
from weightsync_sender.replica.compiled import CompiledRank
from weightsync_sender.replica.program import Program, TensorSpec, compile_program
from weightsync_sender.replica.trace import trace_loading
from weightsync_sender.sources import MemorySource
from weightsync_sender.staging import Ring, SourceMemory
from weightsync_sender.stream import Stream, StreamLimits, Target
from weightsync_sender.transports import WriteState

ROWS, WIDTH = 64, 128
LAYERS = 6


def model_tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    names = [f"{layer}.{part}" for layer in range(LAYERS) for part in ("a", "b", "down")]
    return {name: torch.randn(ROWS, WIDTH, generator=generator).bfloat16() for name in names}


def program_of_rank(rank: int) -> Program:
    """Rows of a and b fused, columns of down: rank ``rank`` of two."""
    half, columns = ROWS // 2, WIDTH // 2
    parameters = {}
    for layer in range(LAYERS):
        parameters[f"{layer}.fused"] = torch.empty(ROWS, WIDTH, dtype=torch.bfloat16, device="meta")
        parameters[f"{layer}.down"] = torch.empty(ROWS, columns, dtype=torch.bfloat16, device="meta")

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, w in weights:
            layer, part = name.split(".")
            if part == "down":
                parameters[name].copy_(w.narrow(1, rank * columns, columns))
            else:
                parameters[f"{layer}.fused"].narrow(0, half * (part == "b"), half).copy_(w.narrow(0, rank * half, half))

    given = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in model_tensors(0).items()}
    trace = trace_loading(parameters, [], given, load)
    return compile_program(trace, {n: TensorSpec(tuple(p.shape), "bfloat16", 2) for n, p in parameters.items()})


def expected(tensors: dict[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    half, columns = ROWS // 2, WIDTH // 2
    out = {}
    for layer in range(LAYERS):
        parts = [tensors[f"{layer}.{part}"][rank * half : (rank + 1) * half] for part in ("a", "b")]
        out[f"{layer}.fused"] = torch.cat(parts)
        out[f"{layer}.down"] = tensors[f"{layer}.down"][:, rank * columns : (rank + 1) * columns]
    return out


class Peer:
    """An engine rank's memory in this process."""

    def __init__(self, engine: str, rank: int, transport: LoopbackTransport, limits: StreamLimits) -> None:
        program = program_of_rank(rank)
        self.rank = rank
        self.memory = {name: torch.full((spec.nbytes,), 0xA5, dtype=torch.uint8) for name, spec in program.parameters.items()}
        entries = {
            name: TensorEntry(name, self.memory[name].data_ptr(), spec.nbytes, 2, spec.dtype, spec.shape)
            for name, spec in program.parameters.items()
        }
        table = ParameterTable("target", Placement(rank, rank, 2), "g", Identity("x"), entries, MappingProxyType({}))
        self.connection = LoopbackConnection(registered=transport.registered)
        compiled = CompiledRank(cast(Any, None), program, f"rank-{rank}")
        self.target = Target(engine, table, self.connection, compiled, limits)

    def holds(self, tensors: dict[str, torch.Tensor]) -> bool:
        wanted = expected(tensors, self.rank)
        return all(torch.equal(self.memory[name], wanted[name].contiguous().view(torch.uint8).reshape(-1)) for name in wanted)

    def untouched(self) -> bool:
        return all(bool((raw == 0xA5).all()) for raw in self.memory.values())


def limits(**changes: Any) -> StreamLimits:
    values: dict[str, Any] = {
        "batch_bytes": 1 << 14,
        "batch_count": 16,
        "in_flight": 2,
        "write_seconds": 0.3,
        "slowest_rate": 1e9,
        "held_bytes": float("inf"),
    }
    return StreamLimits(**{**values, **changes})


class Setup:
    """Peers, staging memory and one stream."""

    def __init__(
        self, names: list[tuple[str, int]], *, buffer: int = 1 << 20, rate: float | None = None, digests: bool = False, **changes: Any
    ) -> None:
        self.transport = LoopbackTransport()
        self.limits = limits(**changes)
        self.peers = [Peer(engine, rank, self.transport, self.limits) for engine, rank in names]
        largest = max(peer.target.rank.program.largest_packed() for peer in self.peers)
        self.ring = Ring(self.transport, torch.device("cpu"), buffer, largest)
        self.memory = SourceMemory(self.transport, clock=lambda: 0.0)
        self.finished: list[str] = []
        self.stream = Stream(
            [peer.target for peer in self.peers],
            self.ring,
            self.memory,
            self.limits,
            digests=digests,
            rate=rate,
            finished=lambda target: self.finished.append(target.engine),
            moved=lambda nbytes: None,
        )

    def run(self, tensors: dict[str, torch.Tensor], order: Iterable[str] | None = None) -> None:
        names = list(order or tensors)
        self.stream.run(MemorySource(tensors).manifest(), ((name, tensors[name]) for name in names))


ALL_DIRECT, ALL_PACKED = 1.0, 1e15
"""Link rates at which every run, and no run, is worth a descriptor of its own."""


@pytest.mark.parametrize("rate", [ALL_DIRECT, None, ALL_PACKED])
@pytest.mark.parametrize("buffer", [ROWS * WIDTH * 2, 5 * ROWS * WIDTH, 1 << 20])
@pytest.mark.parametrize("seed", range(3))
def test_any_order_and_any_buffer_fill_every_target(rate: float | None, buffer: int, seed: int) -> None:
    setup = Setup([("e0", 0), ("e0", 1), ("e1", 0), ("e1", 1)], buffer=buffer, rate=rate)
    tensors = model_tensors(seed)
    order = list(tensors)
    random.Random(seed).shuffle(order)
    setup.run(tensors, order)
    assert all(peer.holds(tensors) for peer in setup.peers)
    assert sorted(setup.finished) == ["e0", "e0", "e1", "e1"]


def test_direct_runs_are_written_from_where_the_tensor_lies_and_the_rest_is_counted() -> None:
    setup = Setup([("e0", 0), ("e1", 0)], rate=ALL_DIRECT)
    tensors = model_tensors(1)
    setup.run(tensors)
    sources = {tensor.data_ptr(): tensor.nbytes for tensor in tensors.values()}
    fused = [
        p
        for peer in setup.peers
        for w in peer.connection.writes
        for p in w.pieces
        if any(s <= p.source < s + n for s, n in sources.items())
    ]
    assert sum(piece.length for piece in fused) == setup.stream.direct_bytes == 2 * LAYERS * ROWS * WIDTH * 2
    assert setup.stream.packed_bytes == 2 * LAYERS * ROWS * WIDTH
    assert setup.stream.direct_bytes + setup.stream.packed_bytes == sum(peer.target.planned for peer in setup.peers)


def test_bytes_on_the_wire_equal_planned_bytes() -> None:
    setup = Setup([("e0", 0), ("e0", 1)])
    setup.run(model_tensors(1))
    for peer in setup.peers:
        sent = sum(piece.length for write in peer.connection.writes for piece in write.pieces)
        assert sent == peer.target.written == peer.target.planned


def test_registrations_do_not_grow_over_a_hundred_passes() -> None:
    setup = Setup([("e0", 0)], rate=ALL_DIRECT)
    tensors = model_tensors(1)
    counts = set()
    for _ in range(100):
        setup.peers = [Peer("e0", 0, setup.transport, setup.limits)]
        setup.stream = Stream(
            [setup.peers[0].target],
            setup.ring,
            setup.memory,
            setup.limits,
            digests=False,
            rate=ALL_DIRECT,
            finished=lambda t: None,
            moved=lambda n: None,
        )
        setup.run(tensors)
        setup.memory.release(keep_living=True)
        assert setup.peers[0].holds(tensors)
        counts.add((len(setup.transport.registered), setup.transport.registrations))
    assert len(counts) == 1


def test_memory_that_was_freed_is_registered_anew() -> None:
    setup = Setup([("e0", 0)], rate=ALL_DIRECT)
    setup.run(model_tensors(1))
    setup.memory.release(keep_living=True)
    assert setup.memory.registered == 0, "the tensors are gone, so must their registrations be"


def test_a_slow_source_holds_only_a_bounded_part_of_its_tensors() -> None:
    most = 0
    setup = Setup([("e0", 0)], rate=ALL_DIRECT, held_bytes=4 * ROWS * WIDTH * 2, batch_bytes=1)
    tensors = model_tensors(1)

    def fresh() -> Iterable[tuple[str, torch.Tensor]]:
        nonlocal most
        for name, tensor in tensors.items():
            most = max(most, setup.memory.held_bytes)
            yield name, tensor.clone()

    setup.stream.run(MemorySource(tensors).manifest(), fresh())
    assert setup.peers[0].holds(tensors)
    assert most <= 5 * ROWS * WIDTH * 2


def test_what_waits_in_an_open_batch_goes_out_when_too_much_is_held() -> None:
    setup = Setup([("e0", 0)], rate=ALL_DIRECT, held_bytes=ROWS * WIDTH * 2, batch_bytes=64 << 20, batch_count=1024)
    tensors = model_tensors(1)
    setup.stream.run(MemorySource(tensors).manifest(), ((name, tensor.clone()) for name, tensor in tensors.items()))
    assert setup.peers[0].holds(tensors)


def test_what_a_hung_write_holds_does_not_stop_the_others() -> None:
    setup = Setup([("hung", 0), ("good", 1)], rate=ALL_DIRECT, held_bytes=ROWS * WIDTH * 2, batch_bytes=1)
    setup.peers[0].connection.behaviour = hang
    tensors = model_tensors(1)
    setup.stream.run(MemorySource(tensors).manifest(), ((name, tensor.clone()) for name, tensor in tensors.items()))
    assert setup.peers[1].holds(tensors)
    assert "was not over in its time" in setup.peers[0].target.error


def test_memory_that_cannot_be_registered_is_packed() -> None:
    setup = Setup([("e0", 0)], rate=ALL_DIRECT)
    setup.transport.full = True
    tensors = model_tensors(1)
    setup.run(tensors)
    assert setup.peers[0].holds(tensors)
    assert setup.stream.direct_bytes == 0


def test_digests_are_those_of_the_bytes_that_arrive() -> None:
    setup = Setup([("e0", 0), ("e0", 1)], digests=True)
    setup.run(model_tensors(1))
    for peer in setup.peers:
        for name, raw in peer.memory.items():
            first, second, covered = setup.stream.sums[peer.target.rank.key][name]
            assert digest_text((first, second, covered)) == digest_text(lane_sums(raw, [(0, raw.numel())], torch))


def hang(write: LoopbackWrite) -> None:
    """The peer never answers."""


def refuse(write: LoopbackWrite) -> None:
    write.state, write.error = WriteState.FAILED, "peer is gone"


@pytest.mark.parametrize("rate", [ALL_DIRECT, ALL_PACKED])
@pytest.mark.parametrize(("fault", "words"), [(hang, "was not over in its time"), (refuse, "peer is gone")])
def test_one_bad_target_fails_alone(fault: Callable[[LoopbackWrite], None], words: str, rate: float) -> None:
    setup = Setup([("bad", 0), ("good", 0), ("good", 1)], buffer=ROWS * WIDTH * 2, rate=rate)
    setup.peers[0].connection.behaviour = fault
    tensors = model_tensors(2)
    setup.run(tensors)
    bad, *good = setup.peers
    assert words in bad.target.error
    assert all(peer.holds(tensors) and not peer.target.error for peer in good)


def test_a_slot_that_a_hung_write_reads_is_never_reused_before_it_is_over() -> None:
    setup = Setup([("hung", 0), ("good", 0)], buffer=ROWS * WIDTH * 2, rate=ALL_PACKED)
    hung = setup.peers[0].connection
    hung.behaviour = hang
    tensors = model_tensors(3)
    setup.run(tensors)
    setup.stream.settle(0.0)
    before = [bytes(_read(piece.source, piece.length)) for write in hung.writes for piece in write.pieces]
    again = Peer("good", 0, setup.transport, setup.limits)
    stream = Stream(
        [again.target],
        setup.ring,
        setup.memory,
        setup.limits,
        digests=False,
        rate=ALL_PACKED,
        finished=lambda t: None,
        moved=lambda n: None,
    )
    other = model_tensors(4)
    stream.run(MemorySource(other).manifest(), iter(other.items()))
    assert again.holds(other)
    assert [bytes(_read(piece.source, piece.length)) for write in hung.writes for piece in write.pieces] == before
    registered = len(setup.transport.registered)
    for write in hung.writes:
        write.land()
    assert not setup.peers[0].target.still_flying()
    setup.ring.sweep()
    assert len(setup.transport.registered) < registered


def _read(address: int, length: int) -> Any:
    import ctypes

    return (ctypes.c_char * length).from_address(address)


def test_a_slow_target_does_not_keep_the_others_from_finishing() -> None:
    setup = Setup([("slow", 0), ("good", 0)], rate=ALL_PACKED, write_seconds=5.0)
    slow = setup.peers[0].connection
    late: list[LoopbackWrite] = []
    slow.behaviour = late.append
    order: list[str] = []
    setup.finished = order

    def watch(target: Target) -> None:
        order.append(target.engine)
        for write in late:
            if write.state is WriteState.PENDING:
                write.land()
        slow.behaviour = LoopbackWrite.land

    setup.stream._finished = watch
    tensors = model_tensors(5)
    setup.run(tensors)
    assert order == ["good", "slow"]
    assert all(peer.holds(tensors) for peer in setup.peers)


def test_a_buffer_smaller_than_the_largest_block_is_an_error_that_names_the_need() -> None:
    with pytest.raises(BufferTooSmall, match="8192 bytes") as caught:
        Setup([("e0", 0)], buffer=8191)
    assert caught.value.needed == 8192
    Setup([("e0", 0)], buffer=caught.value.needed)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("3.a"), "missing 3.a"),
        (lambda t: t.update({"9.a": t["0.a"]}), "'9.a' without having stated it"),
        (lambda t: t.update({"3.a": t["3.a"][:1]}), r"'3.a' is \[1, 128\]"),
        (lambda t: t.update({"3.a": t["3.a"].float()}), "'3.a' is .* torch.float32"),
    ],
)
def test_a_source_that_does_not_keep_its_word_is_named(change: Callable[[dict[str, torch.Tensor]], Any], message: str) -> None:
    setup = Setup([("e0", 0)])
    tensors = model_tensors(1)
    manifest = MemorySource(tensors).manifest()
    change(tensors)
    with pytest.raises(SourceError, match=message):
        setup.stream.run(manifest, iter(tensors.items()))


def test_a_tensor_handed_out_twice_is_an_error() -> None:
    setup = Setup([("e0", 0)])
    tensors = model_tensors(1)
    with pytest.raises(SourceError, match=r"'0\.a' twice"):
        setup.stream.run(MemorySource(tensors).manifest(), [("0.a", tensors["0.a"])] * 2)


def test_tensors_that_are_not_contiguous_are_taken_all_the_same() -> None:
    setup = Setup([("e0", 0)])
    tensors = {name: tensor.t().contiguous().t() for name, tensor in model_tensors(6).items()}
    assert not tensors["0.a"].is_contiguous()
    setup.run(tensors)
    assert setup.peers[0].holds(tensors)
