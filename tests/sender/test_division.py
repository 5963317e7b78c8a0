"""Who writes what when several trainer ranks update together."""

from __future__ import annotations

import pytest
import torch

from weightsync_core.errors import SourceError
from weightsync_core.planner import TargetId
from weightsync_core.tables import Identity, ParameterTable, Placement, TensorEntry
from weightsync_sender.division import Division, Member, choose_writers, digest_of, divide, groups, require_agreement
from weightsync_sender.replica.program import Program, TensorSpec, Unit
from weightsync_sender.sources import TensorMeta

META = TensorMeta((4,), torch.float32)


def member(group: str = "", *, digest: str = "d", version: str = "v", node: str = "n", engines: tuple[str, ...] = ("e",)) -> Member:
    return Member(version, engines, group, node, digest)


def unit(parameter: str, *inputs: str) -> Unit:
    return Unit(parameter, 0, 16, (), tuple(inputs), ((0, 16),))


def program(*units: Unit) -> Program:
    return Program({each.parameter: TensorSpec((4,), "float32", 4) for each in units}, units, (), {})


def table(rank: int, size: int, nbytes: int = 100) -> ParameterTable:
    return ParameterTable(
        role="target",
        placement=Placement(rank=rank, tp_rank=rank, tp_size=size),
        generation="g",
        identity=Identity("0.5.23"),
        entries={"a": TensorEntry(name="a", address=0, nbytes=nbytes, item_size=1)},
        sessions={},
    )


def stages() -> Division:
    """Two pipeline stages of two ranks; the embedding is tied and so in both."""
    members = [member("0"), member("0"), member("1"), member("1")]
    return divide(members, {"0": {"embed": META, "a": META}, "1": {"embed": META, "b": META}})


def test_a_piece_belongs_to_the_first_group_that_has_all_its_tensors() -> None:
    whole = program(unit("embed", "embed"), unit("a", "a"), unit("b", "b"), unit("padding"))
    first, second = (stages().pieces(whole, group) for group in ("0", "1"))
    assert [piece.parameter for piece in first if isinstance(piece, Unit)] == ["embed", "a", "padding"]
    assert [piece.parameter for piece in second if isinstance(piece, Unit)] == ["b"]


def test_a_piece_that_needs_two_stages_is_named() -> None:
    with pytest.raises(SourceError, match="parameter fused takes tensors that no source group has all of: a, b"):
        stages().pieces(program(unit("fused", "a", "b")), "0")


def test_one_group_writes_everything() -> None:
    division = divide([member(), member()], {"": {"a": META}})
    whole = program(unit("a", "a"))
    assert division.pieces(whole, "") == whole.units


def test_every_target_has_one_writer_in_each_group_and_keeps_it() -> None:
    engines = [(f"e{index}", "layout", [table(0, 2), table(1, 2)]) for index in range(4)]
    writers = choose_writers(stages(), engines, {})
    assert len(writers) == 2 * 8
    assert {rank for (group, _), rank in writers.items() if group == "0"} == {0, 1}
    assert {rank for (group, _), rank in writers.items() if group == "1"} == {2, 3}
    assert sorted(sum(rank == each for rank in writers.values()) for each in range(4)) == [4, 4, 4, 4]
    kept = choose_writers(stages(), engines[1:], writers)
    assert sum(kept[key] != writers[key] for key in kept) <= 2
    assert ("0", TargetId("e0", "target", 0)) not in kept


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ([member(version="1"), member(version="2")], "different versions: 1, 2"),
        ([member(), member(digest="other")], "ranks 1 hand out other tensors than rank 0"),
        ([member(), member(engines=("x", "y"))], "rank 1 is to update x, y, rank 0 e"),
    ],
)
def test_ranks_that_mean_different_updates_are_refused(members: list[Member], words: str) -> None:
    with pytest.raises(SourceError, match=words):
        require_agreement(members)


def test_one_name_with_two_shapes_is_refused() -> None:
    other = TensorMeta((5,), torch.float32)
    with pytest.raises(SourceError, match="hands out 'a' as"):
        divide([member("0"), member("1")], {"0": {"a": META}, "1": {"a": other}})
    assert digest_of({"a": META}) != digest_of({"a": other})
    assert groups([member("1"), member("0"), member("1")]) == {"1": 0, "0": 1}
