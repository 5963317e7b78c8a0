"""Which pods are trainers and which make up engines. Pure."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from weightsync_core.endpoints import Endpoint
from weightsync_operator.resources import EngineGroup, Key, Pod, WeightSync


@dataclass(frozen=True, slots=True)
class FoundEngine:
    """One engine of a WeightSync: a pod, or the pods of a group whose leader serves HTTP."""

    id: str
    """Name of the pod that serves HTTP, or the group's label value while that pod is missing. Unique in the namespace."""
    group: EngineGroup
    leader: Pod | None
    members: tuple[Pod, ...]
    """All pods by index, the leader too."""
    indices: tuple[int, ...]
    """Places of the members in the engine; (0,) for an engine of one pod."""

    @property
    def url(self) -> str:
        """The engine's address; "" while it has none."""
        return Endpoint(self.leader.ip, self.group.port).url if self.leader is not None and self.leader.ip else ""

    @property
    def uid(self) -> str:
        """Changes when any of its pods is another one or was restarted."""
        return "+".join(f"{pod.uid}.{pod.restarts}" for pod in self.members)


def find_engines(weight_sync: WeightSync, pods: Iterable[Pod]) -> list[FoundEngine]:
    """Engines by id. A pod that several groups select belongs to the first of them."""
    taken: set[str] = set()
    found: list[FoundEngine] = []
    mine = [pod for pod in pods if pod.key.namespace == weight_sync.key.namespace and pod.alive]
    for group in weight_sync.groups:
        selected = [pod for pod in mine if pod.uid not in taken and group.selector.matches(pod.labels)]
        taken.update(pod.uid for pod in selected)
        found += _grouped(group, selected) if group.group_label else [_single(group, pod) for pod in selected]
    return sorted(found, key=lambda engine: natural(engine.id))


def find_trainers(weight_sync: WeightSync, pods: Iterable[Pod]) -> list[Pod]:
    """Trainer pods, by name with numbers in order (``trainer-2`` before ``trainer-10``)."""
    namespace = weight_sync.key.namespace
    return sorted(
        (pod for pod in pods if pod.key.namespace == namespace and pod.alive and weight_sync.trainers.matches(pod.labels)),
        key=lambda pod: natural(pod.key.name),
    )


def owners(weight_syncs: Sequence[WeightSync], found: Mapping[Key, Sequence[FoundEngine]]) -> dict[str, Key]:
    """Pod uid -> the WeightSync that has it: the oldest of those that select it."""
    owner: dict[str, Key] = {}
    for weight_sync in sorted(weight_syncs, key=lambda each: each.age_order):
        for engine in found[weight_sync.key]:
            for pod in engine.members:
                owner.setdefault(pod.uid, weight_sync.key)
    return owner


def natural(name: str) -> tuple[tuple[int, str], ...]:
    """Sort key in which numbers count as numbers."""
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name))


def _single(group: EngineGroup, pod: Pod) -> FoundEngine:
    return FoundEngine(pod.key.name, group, pod, (pod,), (0,))


def _grouped(group: EngineGroup, pods: Sequence[Pod]) -> list[FoundEngine]:
    by_value: dict[str, list[Pod]] = defaultdict(list)
    for pod in pods:
        by_value[pod.labels.get(group.group_label, "")].append(pod)
    # Without the group's label nothing says which engine a pod belongs to: each is shown by itself, as incomplete.
    alone = [FoundEngine(pod.key.name, group, None, (pod,), (_index(group, pod),)) for pod in by_value.pop("", [])]
    engines = []
    for value, members in by_value.items():
        ordered = sorted(members, key=lambda pod: (_index(group, pod), pod.key.name))
        leader = ordered[0] if _index(group, ordered[0]) == 0 else None
        engines.append(
            FoundEngine(
                leader.key.name if leader is not None else value,
                group,
                leader,
                tuple(ordered),
                tuple(_index(group, pod) for pod in ordered),
            )
        )
    return [*alone, *engines]


def _index(group: EngineGroup, pod: Pod) -> int:
    text = pod.labels.get(group.index_label, "")
    return int(text) if text.isdigit() else 1 << 30
