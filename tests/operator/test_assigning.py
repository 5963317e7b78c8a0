"""Documents for trainers: every engine once, least movement, epochs that only grow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from weightsync_core.assignment import Assignment, parse_assignment
from weightsync_operator.assigning import Publication, assign
from weightsync_operator.compatibility import EngineFacts, Reason, Verdict
from weightsync_operator.discovery import FoundEngine
from weightsync_operator.resources import EngineGroup, Key, OnMismatch, Pod, Selector, WeightSync

GROUP = EngineGroup("rollout", Selector({"app": "engine"}, ()), 30000, "", "", 1)
SYNC = WeightSync(
    key=Key("rl", "demo"),
    uid="uid-1",
    generation=1,
    created="2026-01-01T00:00:00Z",
    deleting=False,
    trainers=Selector({"app": "trainer"}, ()),
    trainer_port=9095,
    groups=(GROUP,),
    transport="mooncake",
    require_rdma=False,
    update={"verify": "off"},
    sglang="",
    architecture="",
    on_mismatch=OnMismatch.EXCLUDE,
    manage_gate=True,
    suspended=False,
    status={},
)


def pod(name: str, **changes: Any) -> Pod:
    made = Pod(Key("rl", name), f"uid-{name}", {"app": "engine"}, "node", "10.0.0.1", "Running", False, 0, False, "")
    return replace(made, **changes)


def verdict(name: str, *, generation: str = "g", size: int = 1, reason: Reason | None = None, **changes: Any) -> Verdict:
    facts = EngineFacts(generation, "0.5.23", "sm_90", ("mooncake",), {}, size, 1, ("target",), size << 30, "default")
    leader = pod(name, **changes)
    return Verdict(FoundEngine(name, GROUP, leader, (leader,), (0,)), facts, reason)


def trainers(number: int) -> list[Pod]:
    return [pod(f"trainer-{index}") for index in range(number)]


def writers(publication: Publication) -> dict[str, str]:
    return {engine.id: name for name, document in publication.documents.items() for engine in document.engines}


def test_first_documents() -> None:
    made = assign(SYNC, trainers(2), [verdict("a", size=2), verdict("b"), verdict("c")], {})
    assert made.epoch == 1
    assert made.changed
    assert set(writers(made)) == {"a", "b", "c"}
    whole = [parse_assignment(document.dump()) for document in made.documents.values()]
    assert sorted(len(document.targets[0]) for document in whole) == [2, 2]
    assert {document.weight_sync.uid for document in whole} == {"uid-1"}


def test_nothing_changes_when_nothing_changed() -> None:
    engines = [verdict("a"), verdict("b")]
    made = assign(SYNC, trainers(2), engines, {})
    again = assign(SYNC, trainers(2), engines, made.documents)
    assert not again.changed
    assert again.epoch == made.epoch
    assert again.documents == made.documents


def test_whatever_differs_is_a_new_epoch_for_all() -> None:
    engines = [verdict("a"), verdict("b")]
    published = assign(SYNC, trainers(2), engines, {}).documents
    for changed in (
        assign(SYNC, trainers(2), [verdict("a", generation="h"), verdict("b")], published),
        assign(SYNC, trainers(2), [verdict("a", restarts=1), verdict("b")], published),
        assign(SYNC, trainers(2), [verdict("a", ip="10.0.0.9"), verdict("b")], published),
        assign(SYNC, trainers(2), engines[:1], published),
        assign(SYNC, trainers(3), engines, published),
        assign(replace(SYNC, update={"verify": "digest"}), trainers(2), engines, published),
        assign(replace(SYNC, uid="uid-2"), trainers(2), engines, published),
    ):
        assert changed.changed
        assert {document.epoch for document in changed.documents.values()} == {2}


def test_excluded_engines_are_in_no_document() -> None:
    made = assign(SYNC, trainers(1), [verdict("a"), verdict("b", reason=Reason.SGLANG_MISMATCH)], {})
    assert writers(made) == {"a": "trainer-0"}


def test_documents_of_trainers_that_are_gone_are_obsolete_and_their_epoch_counts() -> None:
    published = assign(SYNC, trainers(3), [verdict("a")], {}).documents
    ahead = {**published, "trainer-2": replace(published["trainer-2"], epoch=41)}
    made = assign(SYNC, trainers(2), [verdict("a")], ahead)
    assert made.obsolete == ("trainer-2",)
    assert made.epoch == 42


@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=12, unique=True),
    st.lists(st.integers(0, 30), max_size=12, unique=True),
    st.integers(1, 5),
)
def test_every_engine_has_one_writer_and_stays_where_it_may(first: list[int], second: list[int], number: int) -> None:
    made: Publication | None = None
    published: dict[str, Assignment] = {}
    for wanted in (first, second):
        engines = [verdict(f"engine-{index}") for index in wanted]
        before = writers(made) if made is not None else {}
        made = assign(SYNC, trainers(number), engines, published)
        published = dict(made.documents)
        assert set(writers(made)) == {f"engine-{index}" for index in wanted}
        loads = [len(document.engines) for document in made.documents.values()]
        assert max(loads) - min(loads) <= 1
        kept = set(before) & set(writers(made))
        moved = sum(before[name] != writers(made)[name] for name in kept)
        most = -(-len(wanted) // number)
        crowded = sum(max(0, sum(before[name] == trainer for name in kept) - most) for trainer in made.documents)
        short = sum(max(0, len(wanted) // number - sum(before[name] == trainer for name in kept)) for trainer in made.documents)
        assert moved <= max(crowded, short)
