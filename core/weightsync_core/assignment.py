"""The document that tells one trainer which targets it writes: schema, canonical text, digest, acceptance.

Written by the operator (or made in process where there is none), read by the sender. A document that is not whole, not
meant for this reader, or older than what it has is refused with the reason, and the last good one stays.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from weightsync_core.errors import DocumentError
from weightsync_core.planner import TargetId

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class WeightSyncRef:
    """The WeightSync resource that the assignment belongs to."""

    namespace: str
    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class AssignedEngine:
    """One engine, as the assignment names it."""

    id: str
    uid: str
    """Changes when the engine is another one under the same name (pod uid and restarts)."""
    url: str
    generation: str
    size: int
    """Ranks."""
    roles: tuple[str, ...] = ("target",)


@dataclass(frozen=True)
class Assignment:
    """What one trainer pod writes."""

    weight_sync: WeightSyncRef
    epoch: int
    """Grows with every change; from the cluster, not from memory."""
    trainer: str
    """Pod name."""
    engines: tuple[AssignedEngine, ...]
    targets: Mapping[int, tuple[TargetId, ...]]
    """By trainer rank."""
    transport: Mapping[str, Any] = field(default_factory=dict)
    update: Mapping[str, Any] = field(default_factory=dict)

    def dump(self) -> str:
        """The document with its digest, as canonical JSON."""
        body = self._body()
        return _canonical({**body, "digest": _digest(body)})

    def _body(self) -> dict[str, Any]:
        return {
            "schemaVersion": SCHEMA_VERSION,
            "weightSync": {"namespace": self.weight_sync.namespace, "name": self.weight_sync.name, "uid": self.weight_sync.uid},
            "epoch": self.epoch,
            "trainer": self.trainer,
            "engines": [
                {"id": e.id, "uid": e.uid, "url": e.url, "generation": e.generation, "size": e.size, "roles": list(e.roles)}
                for e in self.engines
            ],
            "targets": {str(rank): [list(target) for target in targets] for rank, targets in self.targets.items()},
            "transport": dict(self.transport),
            "update": dict(self.update),
        }


def parse_assignment(text: str) -> Assignment:
    """Read a document.

    Raises:
        DocumentError: no JSON object, an unknown schemaVersion, a wrong digest, a field of another type, or targets of
            engines that are not listed.
    """
    try:
        document = json.loads(text)
    except ValueError as error:
        raise DocumentError(f"assignment is no JSON: {error}") from error
    if not isinstance(document, dict):
        raise DocumentError(f"assignment is a {type(document).__name__}, expected an object")
    version = document.get("schemaVersion")
    if version != SCHEMA_VERSION:
        raise DocumentError(f"assignment has schemaVersion {version!r}, this reader knows {SCHEMA_VERSION}: operator and sender must match")
    digest = document.pop("digest", None)
    expected = _digest(document)
    if digest != expected:
        raise DocumentError(
            f"assignment of epoch {document.get('epoch')!r} has digest {digest!r}, its text gives {expected}: it is not whole"
        )
    try:
        assignment = Assignment(
            weight_sync=WeightSyncRef(**document["weightSync"]),
            epoch=document["epoch"],
            trainer=document["trainer"],
            engines=tuple(AssignedEngine(**{**engine, "roles": tuple(engine["roles"])}) for engine in document["engines"]),
            targets={int(rank): tuple(TargetId(*target) for target in targets) for rank, targets in document["targets"].items()},
            transport=document["transport"],
            update=document["update"],
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DocumentError(f"assignment cannot be read: {type(error).__name__}: {error}") from error
    if isinstance(assignment.epoch, bool) or not isinstance(assignment.epoch, int) or assignment.epoch < 0:
        raise DocumentError(f"assignment has epoch {assignment.epoch!r}, expected a whole number")
    known = {engine.id for engine in assignment.engines}
    unknown = {target.engine for targets in assignment.targets.values() for target in targets} - known
    if unknown:
        raise DocumentError(f"assignment has targets of engines that it does not list: {sorted(unknown)}")
    return assignment


def accept(current: Assignment | None, text: str, *, retired: frozenset[str] = frozenset()) -> Assignment:
    """The new assignment if it may replace the current one.

    A WeightSync that was deleted and made anew has another uid and counts epochs from the start; its documents replace those
    of the old one, which never come back.

    Args:
        retired: uids of former WeightSyncs of this name.

    Raises:
        DocumentError: unreadable, for another trainer or WeightSync, of a retired one, or of a lower epoch. The current one
            stays good.
    """
    new = parse_assignment(text)
    if new.weight_sync.uid in retired:
        raise DocumentError(f"assignment belongs to WeightSync uid {new.weight_sync.uid}, which was deleted and made anew since")
    if current is None:
        return new
    here, there = current.weight_sync, new.weight_sync
    if (here.namespace, here.name, current.trainer) != (there.namespace, there.name, new.trainer):
        raise DocumentError(
            f"assignment is for trainer {new.trainer} of WeightSync {there.namespace}/{there.name}, this is {current.trainer} of "
            f"{here.namespace}/{here.name}"
        )
    if here.uid == there.uid and new.epoch < current.epoch:
        raise DocumentError(f"assignment has epoch {new.epoch}, epoch {current.epoch} is in force")
    return new


def _canonical(body: Mapping[str, Any]) -> str:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(_canonical(body).encode()).hexdigest()
