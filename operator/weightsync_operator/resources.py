"""Kubernetes objects as the operator needs them: slim values, parsed once from the API's JSON. No I/O."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from weightsync_core.errors import DocumentError
from weightsync_core.labels import READINESS_GATE


class Key(NamedTuple):
    """Names an object of one kind."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class Pod:
    """One pod."""

    key: Key
    uid: str
    labels: Mapping[str, str]
    node: str
    ip: str
    phase: str
    deleting: bool
    restarts: int
    """Of all containers: a changed number means another process may answer."""
    gated: bool
    """Whether it lists the readiness gate that the operator sets."""
    gate: str
    """Status of that gate's condition, "" if nobody set it."""

    @property
    def alive(self) -> bool:
        """Whether it may serve, now or soon."""
        return not self.deleting and self.phase not in ("Succeeded", "Failed")


def parse_pod(body: Mapping[str, Any]) -> Pod:
    """Read a Pod object."""
    meta, spec, status = body["metadata"], body.get("spec") or {}, body.get("status") or {}
    conditions = {condition["type"]: condition["status"] for condition in status.get("conditions") or ()}
    return Pod(
        key=key_of(body),
        uid=meta["uid"],
        labels=dict(meta.get("labels") or {}),
        node=spec.get("nodeName") or "",
        ip=status.get("podIP") or "",
        phase=status.get("phase") or "",
        deleting="deletionTimestamp" in meta,
        restarts=sum(container.get("restartCount", 0) for container in status.get("containerStatuses") or ()),
        gated=any(gate["conditionType"] == READINESS_GATE for gate in spec.get("readinessGates") or ()),
        gate=conditions.get(READINESS_GATE, ""),
    )


def key_of(body: Mapping[str, Any]) -> Key:
    """Namespace and name."""
    return Key(body["metadata"].get("namespace") or "", body["metadata"]["name"])


@dataclass(frozen=True, slots=True)
class Expression:
    """One of ``matchExpressions``."""

    key: str
    operator: str
    values: frozenset[str]

    def matches(self, labels: Mapping[str, str]) -> bool:
        """As ``metav1.LabelSelectorRequirement``."""
        match self.operator:
            case "In":
                return labels.get(self.key) in self.values
            case "NotIn":
                return labels.get(self.key) not in self.values
            case "Exists":
                return self.key in labels
            case "DoesNotExist":
                return self.key not in labels
        raise DocumentError(f"selector has operator {self.operator!r}, expected In, NotIn, Exists or DoesNotExist")


@dataclass(frozen=True, slots=True)
class Selector:
    """A label selector."""

    labels: Mapping[str, str]
    expressions: tuple[Expression, ...]

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Whether all of it holds; an empty selector matches nothing here."""
        if not self.labels and not self.expressions:
            return False
        return all(labels.get(key) == value for key, value in self.labels.items()) and all(e.matches(labels) for e in self.expressions)


class OnMismatch(StrEnum):
    """What an engine of another build does to the others."""

    EXCLUDE = "Exclude"
    BLOCK = "Block"


@dataclass(frozen=True, slots=True)
class EngineGroup:
    """One of ``spec.engineGroups``."""

    name: str
    selector: Selector
    port: int
    group_label: str
    """Pods with an equal value are one engine; "" if every pod is one."""
    index_label: str
    pods: int
    """Pods of one engine; 0 if only the engine knows."""


@dataclass(frozen=True, slots=True)
class WeightSync:
    """One WeightSync resource."""

    key: Key
    uid: str
    generation: int
    created: str
    """RFC 3339; the older of two keeps an engine that both select."""
    deleting: bool
    trainers: Selector
    trainer_port: int
    groups: tuple[EngineGroup, ...]
    transport: str
    """``mooncake`` or ``nixl``."""
    require_rdma: bool
    update: Mapping[str, Any]
    """Settings of updates as the assignment states them."""
    sglang: str
    """Version that engines must run; "" for the trainers' own."""
    architecture: str
    on_mismatch: OnMismatch
    manage_gate: bool
    suspended: bool
    status: Mapping[str, Any] = field(compare=False)
    """As last written, by the operator itself."""

    @property
    def age_order(self) -> tuple[str, str]:
        """Sorts the older first."""
        return self.created, self.uid


_VERIFY = {"Off": "off", "Digest": "digest", "Snapshot": "snapshot"}
_PAUSE_MODE = {"Abort": "abort", "Retract": "retract", "InPlace": "in_place"}


def parse_weight_sync(body: Mapping[str, Any]) -> WeightSync:
    """Read a WeightSync whose defaults the API server has filled in.

    Raises:
        DocumentError: a field that the installed CRD does not know or fill in; its version is not this operator's.
    """
    meta = body["metadata"]
    try:
        spec = body["spec"]
        update, compatibility = spec["update"], spec["compatibility"]
        settings: dict[str, Any] = {
            "buffer_size": update["bufferSizeMegabytes"] << 20,
            "verify": _VERIFY[update["verify"]],
            "pause_mode": _PAUSE_MODE[update["pauseMode"]],
        }
        if "minimumEngines" in update:
            settings["minimum_engines"] = update["minimumEngines"]
        return WeightSync(
            key=key_of(body),
            uid=meta["uid"],
            generation=meta["generation"],
            created=meta["creationTimestamp"],
            deleting="deletionTimestamp" in meta,
            trainers=_selector(spec["trainer"]["selector"]),
            trainer_port=spec["trainer"]["port"],
            groups=tuple(_group(group) for group in spec["engineGroups"]),
            transport=spec["transport"]["backend"].lower(),
            require_rdma=spec["transport"]["network"] == "RDMA",
            update=settings,
            sglang=compatibility.get("sglang") or "",
            architecture=compatibility.get("gpuArchitecture") or "",
            on_mismatch=OnMismatch(compatibility["onMismatch"]),
            manage_gate=spec["readinessGate"] == "Enabled",
            suspended=spec["suspend"],
            status=body.get("status") or {},
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DocumentError(
            f"WeightSync {key_of(body)} cannot be read ({type(error).__name__}: {error}): the installed CRD is of another version; "
            "apply this version's crds/"
        ) from error


def _group(group: Mapping[str, Any]) -> EngineGroup:
    pods = group.get("podGroup")
    return EngineGroup(
        group["name"],
        _selector(group["selector"]),
        group["port"],
        pods["label"] if pods is not None else "",
        pods["indexLabel"] if pods is not None else "",
        pods.get("size", 0) if pods is not None else 1,
    )


def _selector(selector: Mapping[str, Any]) -> Selector:
    return Selector(
        dict(selector.get("matchLabels") or {}),
        tuple(Expression(e["key"], e["operator"], frozenset(e.get("values") or ())) for e in selector.get("matchExpressions") or ()),
    )


def timestamp(moment: dt.datetime) -> str:
    """RFC 3339 in UTC, in whole seconds, as Kubernetes writes it."""
    return moment.astimezone(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
