"""What the operator knows of the cluster, kept by watches and repaired by full lists. No I/O.

A watch brings one object at a time; a list brings all of them and says which changes no watch has brought.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from weightsync_core.assignment import Assignment, parse_assignment
from weightsync_core.errors import DocumentError
from weightsync_core.labels import ASSIGNMENT_KEY, GPU_PRODUCT_LABELS, NAME_LABEL, TRAINER_LABEL
from weightsync_operator.resources import Key, Pod, WeightSync, key_of, parse_pod, parse_weight_sync

log = logging.getLogger(__name__)

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Held:
    """One trainer's ConfigMap."""

    key: Key
    weight_sync: str
    trainer: str
    document: Assignment | None
    """None if its text cannot be read: it is written anew."""


def parse_held(body: Mapping[str, Any]) -> Held:
    """Read an assignment's ConfigMap."""
    labels = body["metadata"].get("labels") or {}
    text = (body.get("data") or {}).get(ASSIGNMENT_KEY, "")
    try:
        document = parse_assignment(text)
    except DocumentError as error:
        log.warning("weightsync: configmap=%s is written anew: %s", key_of(body), error)
        document = None
    return Held(key_of(body), labels.get(NAME_LABEL, ""), labels.get(TRAINER_LABEL, ""), document)


def parse_node_architecture(body: Mapping[str, Any]) -> str:
    """``sm_90`` from a node's labels, "" without them."""
    labels = body["metadata"].get("labels") or {}
    numbers = [labels.get(name, "") for name in GPU_PRODUCT_LABELS]
    return f"sm_{''.join(numbers)}" if all(numbers) else ""


class Kind(Generic[Value]):
    """All objects of one kind in the served namespaces."""

    def __init__(self, parse: Callable[[Mapping[str, Any]], Value], changed: Callable[[Key, Value | None, Value | None], None]) -> None:
        """Args: parse: object to value; changed: called with key, old and new value whenever they differ."""
        self._parse, self._changed = parse, changed
        self._values: dict[Key, Value] = {}
        self._versions: dict[Key, str] = {}

    def put(self, body: Mapping[str, Any]) -> None:
        """An object that exists now."""
        key = key_of(body)
        self._versions[key] = body["metadata"].get("resourceVersion", "")
        try:
            value = self._parse(body)
        except DocumentError as error:
            log.error("weightsync: object=%s ignored: %s", key, error)
            return
        before = self._values.get(key)
        self._values[key] = value
        if before != value:
            self._changed(key, before, value)

    def drop(self, key: Key) -> None:
        """An object that is gone."""
        self._versions.pop(key, None)
        before = self._values.pop(key, None)
        if before is not None:
            self._changed(key, before, None)

    def replace(self, namespace: str, bodies: Sequence[Mapping[str, Any]]) -> None:
        """All objects of a namespace ("" for all namespaces), as a list found them."""
        listed = {key_of(body) for body in bodies}
        for key in [key for key in self._values if key not in listed and namespace in ("", key.namespace)]:
            self.drop(key)
        for body in bodies:
            self.put(body)

    def unseen(self, namespace: str, bodies: Sequence[Mapping[str, Any]]) -> set[Key]:
        """Objects whose listed version is another than the one known: a watch that lives brings them in a moment."""
        listed = {key_of(body): body["metadata"].get("resourceVersion", "") for body in bodies}
        other = {key for key, version in listed.items() if self._versions.get(key) != version}
        return other | {key for key in self._versions if key not in listed and namespace in ("", key.namespace)}

    def get(self, key: Key) -> Value | None:
        """One value."""
        return self._values.get(key)

    def items(self) -> list[tuple[Key, Value]]:
        """All keys and values."""
        return list(self._values.items())

    def values(self) -> list[Value]:
        """All values."""
        return list(self._values.values())


@dataclass
class Store:
    """The four kinds; ``wake`` is told which WeightSyncs a change is about."""

    wake: Callable[[Key], None]
    pods: Kind[Pod] = field(init=False)
    weight_syncs: Kind[WeightSync] = field(init=False)
    held: Kind[Held] = field(init=False)
    nodes: Kind[str] = field(init=False)

    def __post_init__(self) -> None:
        self.pods = Kind(parse_pod, self._pod_changed)
        self.weight_syncs = Kind(parse_weight_sync, self._weight_sync_changed)
        self.held = Kind(parse_held, self._held_changed)
        self.nodes = Kind(parse_node_architecture, self._node_changed)

    def _pod_changed(self, key: Key, before: Pod | None, after: Pod | None) -> None:
        labels = [pod.labels for pod in (before, after) if pod is not None]
        for weight_sync in self.weight_syncs.values():
            selectors = (weight_sync.trainers, *(group.selector for group in weight_sync.groups))
            if weight_sync.key.namespace == key.namespace and any(s.matches(each) for s in selectors for each in labels):
                self.wake(weight_sync.key)

    def _weight_sync_changed(self, key: Key, before: WeightSync | None, after: WeightSync | None) -> None:
        self.wake(key)
        # Who owns an engine depends on all of them.
        if before is None or after is None or before.groups != after.groups:
            for other in self.weight_syncs.values():
                if other.key.namespace == key.namespace:
                    self.wake(other.key)

    def _node_changed(self, key: Key, before: str | None, after: str | None) -> None:
        for weight_sync in self.weight_syncs.values():
            self.wake(weight_sync.key)

    def _held_changed(self, key: Key, before: Held | None, after: Held | None) -> None:
        for held in (before, after):
            if held is not None and held.weight_sync:
                self.wake(Key(key.namespace, held.weight_sync))
