import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync_core.errors import PlanError
from weightsync_core.planner import Plan, PlanTarget, TargetId, TrainerRank, plan


def trainers(per_node: list[int]) -> list[TrainerRank]:
    numbers = itertools.count()
    return [TrainerRank(next(numbers), f"node-{node}") for node, count in enumerate(per_node) for _ in range(count)]


def engine_targets(sizes: list[int], nbytes: int = 1) -> list[PlanTarget]:
    return [
        PlanTarget(TargetId(f"engine-{number}", "target", rank), nbytes, f"{size}/{rank}")
        for number, size in enumerate(sizes)
        for rank in range(size)
    ]


def two_pass(senders: list[TrainerRank], targets: list[PlanTarget]) -> dict[int, int]:
    """The rule to beat, written down once more: loads by rank."""
    loads = {trainer.rank: 0 for trainer in senders}
    makers: dict[str, list[int]] = {}
    turns: dict[str, int] = {}
    ranks = sorted(loads)
    for index, target in enumerate(targets):
        if index < len(ranks):
            writer = ranks[index]
            makers.setdefault(target.layout, []).append(writer)
        else:
            able = makers.setdefault(target.layout, [ranks[index % len(ranks)]])
            writer = able[turns.get(target.layout, 0) % len(able)]
            turns[target.layout] = turns.get(target.layout, 0) + 1
        loads[writer] += target.nbytes
    return loads


def test_six_ranks_and_four_engines_of_four_get_at_most_three_targets_each() -> None:
    senders, targets = trainers([6]), engine_targets([4, 4, 4, 4])
    made = plan(senders, targets)
    assert sorted(made.rank_loads.values()) == [2, 2, 3, 3, 3, 3]
    assert max(two_pass(senders, targets).values()) == 4


def test_one_rank_writes_everything() -> None:
    made = plan(trainers([1]), engine_targets([1, 3, 4]))
    assert made.rank_loads == {0: 8}
    assert made.of(0) == sorted(target.id for target in engine_targets([1, 3, 4]))


def test_equal_layouts_stay_with_one_rank_where_loads_allow_it() -> None:
    made = plan(trainers([4]), engine_targets([4] * 4))
    assert made.productions == 4
    assert set(made.rank_loads.values()) == {4}


def test_nodes_are_balanced_before_ranks() -> None:
    made = plan(trainers([1, 3]), engine_targets([4]), cards={"node-0": 1, "node-1": 1})
    assert made.node_loads == {"node-0": 2, "node-1": 2}


def test_targets_stay_with_their_writer_when_an_engine_joins() -> None:
    senders = trainers([4, 4])
    before = plan(senders, engine_targets([4, 4]))
    after = plan(senders, engine_targets([4, 4, 4]), previous=before.writers)
    moved = [target for target, writer in before.writers.items() if after.writers[target] != writer]
    assert moved == []


def test_a_writer_that_left_is_replaced() -> None:
    before = plan(trainers([4]), engine_targets([4]))
    after = plan(trainers([3]), engine_targets([4]), previous=before.writers)
    assert set(after.writers.values()) == {0, 1, 2}


@pytest.mark.parametrize(
    ("senders", "targets", "cards", "message"),
    [
        ([], engine_targets([1]), None, "no trainer ranks"),
        ([TrainerRank(1, "a"), TrainerRank(1, "b")], [], None, "given twice: 1"),
        (trainers([1]), engine_targets([1]) * 2, None, "target given twice"),
        (trainers([1]), engine_targets([1], -1), None, "-1 bytes"),
        (trainers([1]), engine_targets([1]), {"node-0": 0}, "without network cards: node-0"),
    ],
)
def test_refuses_what_cannot_be_planned(
    senders: list[TrainerRank], targets: list[PlanTarget], cards: dict[str, int] | None, message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        plan(senders, targets, cards=cards)


nodes = st.lists(st.integers(1, 4), min_size=1, max_size=5)
engine_sizes = st.lists(st.integers(1, 8), min_size=0, max_size=8)


@given(nodes, engine_sizes)
def test_every_target_has_one_writer_and_equal_sizes_are_balanced_as_well_as_can_be(per_node: list[int], sizes: list[int]) -> None:
    senders, targets = trainers(per_node), engine_targets(sizes)
    made = plan(senders, targets)
    check_whole(made, senders, targets)
    # The least load per card that has room for all, tried one by one; ranks of a node share evenly.
    possible = sorted({taken / cards for cards in per_node for taken in range(len(targets) + 1)})
    best = next(load for load in possible if sum(int(load * cards + 1e-9) for cards in per_node) >= len(targets))
    assert max(made.node_loads.values()) == pytest.approx(best)
    for node in range(len(per_node)):
        ranks = [made.rank_loads[t.rank] for t in senders if t.node == f"node-{node}"]
        assert max(ranks) - min(ranks) <= 1


@given(nodes, st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 3)), max_size=40), st.randoms(use_true_random=False))
@settings(max_examples=300)
def test_never_worse_than_two_passes_deterministic_and_independent_of_order_of_ranks(
    per_node: list[int], drawn: list[tuple[int, int]], random: object
) -> None:
    senders = trainers(per_node)
    targets = [PlanTarget(TargetId(f"e{index}", "target", 0), nbytes, str(layout)) for index, (nbytes, layout) in enumerate(drawn)]
    made = plan(senders, targets)
    check_whole(made, senders, targets)
    reference = two_pass(senders, targets)
    cards = {f"node-{node}": count for node, count in enumerate(per_node)}
    worst_node = max(sum(reference[t.rank] for t in senders if t.node == node) / count for node, count in cards.items())
    assert made.cost[:2] <= (worst_node, max(reference.values(), default=0))
    again = plan(list(reversed(senders)), targets)
    assert again.writers == made.writers


@given(nodes, st.lists(st.integers(1, 4), min_size=1, max_size=6), st.data())
def test_keeping_former_writers_costs_no_load(per_node: list[int], sizes: list[int], data: st.DataObject) -> None:
    senders, targets = trainers(per_node), engine_targets(sizes)
    former = {target.id: data.draw(st.integers(0, len(senders) + 2)) for target in targets}
    free, kept = plan(senders, targets), plan(senders, targets, previous=former)
    check_whole(kept, senders, targets)
    assert kept.cost[:2] == free.cost[:2]


def check_whole(made: Plan, senders: list[TrainerRank], targets: list[PlanTarget]) -> None:
    assert set(made.writers) == {target.id for target in targets}
    assert set(made.writers.values()) <= {trainer.rank for trainer in senders}
    assert sum(made.rank_loads.values()) == sum(target.nbytes for target in targets)


@pytest.mark.parametrize(("ranks", "count", "seconds"), [(256, 256, 1.0), (4096, 4096, 10.0)])
@pytest.mark.parametrize("mixed", [False, True])
def test_plans_large_clusters_in_time(ranks: int, count: int, seconds: float, mixed: bool) -> None:
    senders = trainers([8] * (ranks // 8))
    targets = [
        PlanTarget(TargetId(f"e{index // 8:04d}", "target", index % 8), 1000 + (index * 37 % 11 if mixed else 0), str(index % 8))
        for index in range(count)
    ]
    started = time.monotonic()
    plan(senders, targets)
    assert time.monotonic() - started < seconds
