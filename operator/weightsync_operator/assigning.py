"""Who writes which engine: the documents for all trainer pods of one WeightSync. Pure.

An engine is written whole by one trainer pod. What the cluster holds already decides two things: writers stay where that
costs nothing, and the epoch is one more than the highest published, so that a restarted operator cannot go back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from weightsync_core.assignment import AssignedEngine, Assignment, WeightSyncRef
from weightsync_core.planner import PlanTarget, TargetId, TrainerRank, plan
from weightsync_operator.compatibility import EngineFacts, Verdict
from weightsync_operator.resources import Pod, WeightSync


@dataclass(frozen=True)
class Publication:
    """What the ConfigMaps should hold."""

    epoch: int
    documents: Mapping[str, Assignment]
    """By trainer pod name."""
    obsolete: tuple[str, ...]
    """Trainer pods that are gone and whose ConfigMaps must go too."""
    changed: bool
    """Whether this differs from what is published."""


def assign(
    weight_sync: WeightSync, trainers: Sequence[Pod], verdicts: Sequence[Verdict], published: Mapping[str, Assignment]
) -> Publication:
    """Plan writers for all included engines.

    Args:
        trainers: at least one, in rank order.
        published: assignments in force, by trainer pod.
    """
    included = [(verdict.engine.id, _assigned(verdict), verdict) for verdict in verdicts if verdict.facts is not None and verdict.included]
    position = {pod.key.name: index for index, pod in enumerate(trainers)}
    previous = {
        _whole(engine.id): position[name] for name, document in published.items() if name in position for engine in document.engines
    }
    planned = plan(
        [TrainerRank(index, pod.node or pod.key.name) for index, pod in enumerate(trainers)],
        [PlanTarget(_whole(id_), max(_facts(verdict).nbytes, 1), _layout(verdict)) for id_, _, verdict in included],
        previous=previous,
        cards=None,
    )
    epoch = max((document.epoch for document in published.values()), default=0)
    wanted = {}
    for index, pod in enumerate(trainers):
        mine = [(engine, verdict) for id_, engine, verdict in included if planned.writers[_whole(id_)] == index]
        targets = [
            TargetId(engine.id, role, rank) for engine, verdict in mine for role in _facts(verdict).roles for rank in range(engine.size)
        ]
        wanted[pod.key.name] = Assignment(
            weight_sync=WeightSyncRef(weight_sync.key.namespace, weight_sync.key.name, weight_sync.uid),
            epoch=epoch,
            trainer=pod.key.name,
            engines=tuple(engine for engine, _ in mine),
            targets={0: tuple(targets)},
            transport={"backend": weight_sync.transport, "require_rdma": weight_sync.require_rdma},
            update=dict(weight_sync.update),
        )
    obsolete = tuple(sorted(set(published) - set(wanted)))
    kept = {name: replace(document, epoch=epoch) for name, document in published.items() if name in wanted}
    changed = bool(obsolete) or kept != wanted or any(document.epoch != epoch for document in published.values())
    if changed:
        epoch += 1
        wanted = {name: replace(document, epoch=epoch) for name, document in wanted.items()}
    return Publication(epoch, wanted, obsolete, changed)


def _assigned(verdict: Verdict) -> AssignedEngine:
    engine, facts = verdict.engine, _facts(verdict)
    return AssignedEngine(engine.id, engine.uid, engine.url, facts.generation, facts.size, facts.roles)


def _facts(verdict: Verdict) -> EngineFacts:
    assert verdict.facts is not None
    return verdict.facts


def _layout(verdict: Verdict) -> str:
    return f"{verdict.engine.group.name}/{_facts(verdict).size}/{_facts(verdict).nbytes}"


def _whole(engine: str) -> TargetId:
    return TargetId(engine, "engine", 0)
