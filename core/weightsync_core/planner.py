"""Which trainer rank writes which targets: a pure, deterministic function of both sides.

Every target gets exactly one writer. Minimised in this order: the largest load of a trainer node's network cards, the
largest load of a trainer rank, the number of (rank, layout) pairs that must be produced; targets stay with their former
writer where that costs nothing. Load is bytes. Trainer ranks are those that hold the same tensors (one source group); with
pipeline stages that do not gather, each stage is planned by itself over its own parameters.

Exact where all targets are of one size (the usual case: equal engines). For mixed sizes it is largest-first list
scheduling, whose largest load is at most 4/3 of the best possible on equal nodes (Graham 1969), and never worse than the
two-pass rule (one target each first, then to a rank that already produces this engine rank).
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from weightsync_core.errors import PlanError, listing


class TargetId(NamedTuple):
    """One parameter table to fill."""

    engine: str
    role: str
    rank: int


@dataclass(frozen=True, slots=True)
class TrainerRank:
    """One sender."""

    rank: int
    node: str
    """Ranks of one node share its network cards."""


@dataclass(frozen=True, slots=True)
class PlanTarget:
    """What it costs to fill one target."""

    id: TargetId
    nbytes: int
    layout: str
    """Targets of equal layout get equal bytes: produced once, written many times."""


@dataclass(frozen=True)
class Plan:
    """Writers of all targets."""

    writers: Mapping[TargetId, int]
    rank_loads: Mapping[int, int]
    """Bytes by trainer rank."""
    node_loads: Mapping[str, float]
    """Bytes per network card by node."""
    productions: int
    """(rank, layout) pairs."""

    @property
    def cost(self) -> tuple[float, int, int]:
        """What is minimised, in order."""
        return max(self.node_loads.values(), default=0.0), max(self.rank_loads.values(), default=0), self.productions

    def of(self, rank: int) -> list[TargetId]:
        """A rank's targets, in order."""
        return sorted(target for target, writer in self.writers.items() if writer == rank)


def plan(
    trainers: Sequence[TrainerRank],
    targets: Sequence[PlanTarget],
    *,
    previous: Mapping[TargetId, int] | None = None,
    cards: Mapping[str, int] | None = None,
) -> Plan:
    """Choose a writer for every target.

    Args:
        previous: former writers; kept where that costs nothing.
        cards: network cards by node; default one per trainer rank of the node.

    Raises:
        PlanError: no trainer ranks, a rank or a target twice, a node without cards.
    """
    _check(trainers, targets, cards)
    shape = _Shape(trainers, cards)
    former = {target: writer for target, writer in (previous or {}).items() if writer in shape.node_of}
    balanced = _measure(shape, targets, _balanced(shape, targets, former))
    two_pass = _measure(shape, targets, _two_pass(shape, targets))
    return balanced if balanced.cost <= two_pass.cost else two_pass


def _check(trainers: Sequence[TrainerRank], targets: Sequence[PlanTarget], cards: Mapping[str, int] | None) -> None:
    if not trainers:
        raise PlanError(f"no trainer ranks to write {len(targets)} targets")
    ranks = [trainer.rank for trainer in trainers]
    if len(set(ranks)) != len(ranks):
        raise PlanError(f"trainer ranks given twice: {listing(str(rank) for rank in sorted({r for r in ranks if ranks.count(r) > 1}))}")
    seen: set[TargetId] = set()
    for target in targets:
        if target.id in seen:
            raise PlanError(f"target given twice: {target.id}")
        if target.nbytes < 0:
            raise PlanError(f"target {target.id} has {target.nbytes} bytes")
        seen.add(target.id)
    bare = [node for node in sorted({t.node for t in trainers}) if cards is not None and cards.get(node, 0) < 1]
    if bare:
        raise PlanError(f"nodes without network cards: {listing(bare)}")


class _Shape:
    """The trainer's side."""

    def __init__(self, trainers: Sequence[TrainerRank], cards: Mapping[str, int] | None) -> None:
        self.node_of = {trainer.rank: trainer.node for trainer in trainers}
        self.ranks_of: dict[str, list[int]] = defaultdict(list)
        for trainer in sorted(trainers, key=lambda trainer: trainer.rank):
            self.ranks_of[trainer.node].append(trainer.rank)
        self.nodes = sorted(self.ranks_of, key=lambda node: self.ranks_of[node][0])
        self.cards = {node: (cards[node] if cards is not None else len(self.ranks_of[node])) for node in self.nodes}


def _balanced(shape: _Shape, targets: Sequence[PlanTarget], former: Mapping[TargetId, int]) -> dict[TargetId, int]:
    """Largest first: give out counts by size and rank, then fill the counts with targets so that layouts stay together."""
    by_size: dict[int, list[PlanTarget]] = defaultdict(list)
    for target in targets:
        by_size[target.nbytes].append(target)
    node_load = dict.fromkeys(shape.nodes, 0)
    rank_load = dict.fromkeys(shape.node_of, 0)
    produces: dict[int, set[str]] = defaultdict(set)
    writers: dict[TargetId, int] = {}
    for size in sorted(by_size, reverse=True):
        some = by_size[size]
        kept: dict[int, int] = defaultdict(int)
        for target in some:
            if target.id in former:
                kept[former[target.id]] += 1
        counts = _counts(shape, size, len(some), node_load, rank_load, kept)
        _fill(some, counts, former, produces, writers)
    return writers


def _counts(
    shape: _Shape, size: int, number: int, node_load: dict[str, int], rank_load: dict[int, int], kept: Mapping[int, int]
) -> dict[int, int]:
    """How many targets of one size each rank gets: always to the node, then the rank, that ends up with the least."""
    counts: dict[int, int] = defaultdict(int)
    left = dict(kept)
    node_left = {node: sum(left.get(rank, 0) for rank in shape.ranks_of[node]) for node in shape.nodes}

    def node_key(node: str) -> tuple[float, int, int]:
        return (node_load[node] + size) / shape.cards[node], -node_left[node], shape.ranks_of[node][0]

    def rank_key(rank: int) -> tuple[int, int, int]:
        return rank_load[rank] + size, -left.get(rank, 0), rank

    nodes = [(node_key(node), node) for node in shape.nodes]
    heapq.heapify(nodes)
    ranks = {node: [(rank_key(rank), rank) for rank in shape.ranks_of[node]] for node in shape.nodes}
    for heap in ranks.values():
        heapq.heapify(heap)
    for _ in range(number):
        node = nodes[0][1]
        rank = ranks[node][0][1]
        counts[rank] += 1
        node_load[node] += size
        rank_load[rank] += size
        if left.get(rank, 0):
            left[rank] -= 1
            node_left[node] -= 1
        heapq.heapreplace(ranks[node], (rank_key(rank), rank))
        heapq.heapreplace(nodes, (node_key(node), node))
    return counts


def _fill(
    targets: Sequence[PlanTarget],
    counts: dict[int, int],
    former: Mapping[TargetId, int],
    produces: dict[int, set[str]],
    writers: dict[TargetId, int],
) -> None:
    """Give targets to ranks within their counts: former writers first, then ranks that produce the layout anyway."""
    left = dict(counts)
    by_layout: dict[str, list[PlanTarget]] = defaultdict(list)
    for target in sorted(targets, key=lambda target: target.id):
        writer = former.get(target.id)
        if writer is not None and left.get(writer, 0) > 0:
            writers[target.id] = writer
            left[writer] -= 1
            produces[writer].add(target.layout)
        else:
            by_layout[target.layout].append(target)
    makers: dict[str, list[int]] = defaultdict(list)
    for rank in sorted(left):
        for layout in produces[rank]:
            makers[layout].append(rank)
    # The most numerous layouts first, each into ranks that make it already, then into as few others as possible.
    order = sorted(by_layout, key=lambda layout: (-len(by_layout[layout]), layout))
    largest = [(-count, rank) for rank, count in left.items() if count > 0]
    heapq.heapify(largest)
    for layout in order:
        queue = by_layout[layout]
        at = 0
        for rank in makers[layout]:
            while at < len(queue) and left.get(rank, 0) > 0:
                writers[queue[at].id] = rank
                left[rank] -= 1
                at += 1
        while at < len(queue):
            count, rank = heapq.heappop(largest)
            if -count != left.get(rank, 0):
                if left.get(rank, 0) > 0:
                    heapq.heappush(largest, (-left[rank], rank))
                continue
            take = min(left[rank], len(queue) - at)
            for target in queue[at : at + take]:
                writers[target.id] = rank
            at += take
            left[rank] -= take
            produces[rank].add(layout)
            if left[rank] > 0:
                heapq.heappush(largest, (-left[rank], rank))


def _two_pass(shape: _Shape, targets: Sequence[PlanTarget]) -> dict[TargetId, int]:
    """The rule to beat: first every rank one target, then a rank that already produces this engine rank, round robin."""
    ranks = sorted(shape.node_of)
    writers: dict[TargetId, int] = {}
    producers: dict[str, list[int]] = defaultdict(list)
    turn: dict[str, int] = defaultdict(int)
    for index, target in enumerate(targets):
        if index < len(ranks):
            writers[target.id] = ranks[index]
            producers[target.layout].append(ranks[index])
        else:
            able = producers[target.layout] or [ranks[index % len(ranks)]]
            writers[target.id] = able[turn[target.layout] % len(able)]
            turn[target.layout] += 1
            if not producers[target.layout]:
                producers[target.layout].append(writers[target.id])
    return writers


def _measure(shape: _Shape, targets: Sequence[PlanTarget], writers: Mapping[TargetId, int]) -> Plan:
    ranks = dict.fromkeys(sorted(shape.node_of), 0)
    nodes = dict.fromkeys(shape.nodes, 0)
    pairs = set()
    for target in targets:
        writer = writers[target.id]
        ranks[writer] += target.nbytes
        nodes[shape.node_of[writer]] += target.nbytes
        pairs.add((writer, target.layout))
    return Plan(writers, ranks, {node: load / shape.cards[node] for node, load in nodes.items()}, len(pairs))
