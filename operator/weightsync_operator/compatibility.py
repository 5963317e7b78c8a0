"""Which engines may be written, and why not. Pure.

In: what engines and trainers say about themselves. Out: a verdict for each engine, with both sides' values in its message.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from weightsync_core.errors import listing
from weightsync_operator.discovery import FoundEngine
from weightsync_operator.resources import Key, WeightSync


class Reason(StrEnum):
    """Why an engine gets no weights."""

    PENDING = "Pending"
    """It was not asked yet."""
    NO_ADDRESS = "NoAddress"
    """Its pod has no IP yet."""
    LEADER_MISSING = "LeaderMissing"
    """No pod of the group has index 0."""
    CONNECTION_REFUSED = "ConnectionRefused"
    """Nothing listens at the pod's address: it is starting, or serves on 127.0.0.1 only."""
    UNREACHABLE = "Unreachable"
    """No connection to the pod's address."""
    NOT_ANSWERING = "NotAnswering"
    """It accepts connections and does not answer."""
    UNAUTHORIZED = "Unauthorized"
    """It wants an API key that the operator does not have."""
    NOT_AN_ENGINE = "NotAnEngine"
    """Something else answers there."""
    NO_TABLE = "NoWeightTable"
    """It publishes no parameter memory."""
    INCOMPLETE = "IncompleteRanks"
    """Not all of its ranks have published."""
    SGLANG_MISMATCH = "SglangMismatch"
    ARCHITECTURE_MISMATCH = "ArchitectureMismatch"
    TRANSPORT_MISMATCH = "TransportMismatch"
    CONFLICT = "Conflict"
    """Another WeightSync has it."""


MISMATCHES = frozenset({Reason.SGLANG_MISMATCH, Reason.ARCHITECTURE_MISMATCH, Reason.TRANSPORT_MISMATCH})
"""Reasons that ``compatibility.onMismatch: Block`` is about."""

STARTING = frozenset({Reason.PENDING, Reason.NO_ADDRESS, Reason.LEADER_MISSING, Reason.CONNECTION_REFUSED, Reason.INCOMPLETE})
"""Reasons that a new engine passes through."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What one engine process says about itself."""

    generation: str
    sglang: str
    architecture: str
    """``cpu``, ``sm_90``; "" where a stock engine does not say."""
    transports: tuple[str, ...]
    unavailable: Mapping[str, str]
    """Transports that it was told to publish and could not, with the reason."""
    size: int
    """Ranks."""
    nodes: int
    """Pods that its ranks are spread over, in equal parts."""
    roles: tuple[str, ...]
    nbytes: int
    """Parameter bytes of all ranks and roles; 0 where a stock engine does not say."""
    version: str
    """Weight version that it serves."""


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """Why an engine or a trainer said nothing."""

    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class TrainerFacts:
    """What one trainer pod says about itself."""

    process: str
    """Random, drawn at start."""
    sglang: str
    architecture: str
    epoch: int
    """Of the assignment that it holds, -1 for none."""
    version: str
    """The newest version that it brought to engines, "" for none."""
    updating: str
    """The version that it is bringing now, "" for none."""
    updated_at: float
    """Unix time of the newest version."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether one engine gets weights."""

    engine: FoundEngine
    facts: EngineFacts | None
    reason: Reason | None
    """None: it does."""
    message: str = ""

    @property
    def included(self) -> bool:
        """Whether it gets weights."""
        return self.reason is None


def judge(
    weight_sync: WeightSync,
    engines: Sequence[FoundEngine],
    answers: Mapping[str, EngineFacts | NoAnswer],
    trainers: Iterable[TrainerFacts],
    owner: Mapping[str, Key],
    node_architectures: Mapping[str, str],
) -> list[Verdict]:
    """A verdict for each engine.

    Args:
        answers: by engine id; missing for engines that were not asked yet.
        owner: pod uid -> WeightSync (:func:`weightsync_operator.discovery.owners`).
        node_architectures: from node labels, for engines that do not say; empty where nodes may not be read.
    """
    known = list(trainers)
    wanted_sglang = [weight_sync.sglang] if weight_sync.sglang else sorted({trainer.sglang for trainer in known})
    wanted_arch = [weight_sync.architecture] if weight_sync.architecture else sorted({trainer.architecture for trainer in known})
    return [_judge_one(weight_sync, engine, answers, wanted_sglang, wanted_arch, owner, node_architectures) for engine in engines]


def _judge_one(
    weight_sync: WeightSync,
    engine: FoundEngine,
    answers: Mapping[str, EngineFacts | NoAnswer],
    wanted_sglang: Sequence[str],
    wanted_arch: Sequence[str],
    owner: Mapping[str, Key],
    node_architectures: Mapping[str, str],
) -> Verdict:
    others = {owner[pod.uid] for pod in engine.members if owner.get(pod.uid, weight_sync.key) != weight_sync.key}
    if others:
        return Verdict(
            engine, None, Reason.CONFLICT, f"the older WeightSync {listing(str(other) for other in sorted(others))} selects it too"
        )
    if engine.leader is None:
        return Verdict(
            engine,
            None,
            Reason.LEADER_MISSING,
            f"{len(engine.members)} pods of the group are there, none of them has index 0, which serves HTTP",
        )
    if engine.group.pods and len(engine.members) < engine.group.pods:
        missing = sorted(set(range(engine.group.pods)) - set(engine.indices))
        seen = f"{len(engine.members)} of {engine.group.pods} pods of the engine are there"
        return Verdict(engine, None, Reason.INCOMPLETE, f"{seen}, missing those with index {ranges(missing)}")
    if not engine.url:
        return Verdict(
            engine, None, Reason.NO_ADDRESS, f"pod {engine.leader.key.name} has no IP yet (phase {engine.leader.phase or 'unknown'})"
        )
    answer = answers.get(engine.id)
    if answer is None:
        return Verdict(engine, None, Reason.PENDING, f"{engine.url} was not asked yet")
    if isinstance(answer, NoAnswer):
        return Verdict(engine, None, answer.reason, answer.message)
    reason, message = _mismatch(weight_sync, engine, answer, wanted_sglang, wanted_arch, node_architectures)
    return Verdict(engine, answer, reason, message)


def _mismatch(
    weight_sync: WeightSync,
    engine: FoundEngine,
    facts: EngineFacts,
    wanted_sglang: Sequence[str],
    wanted_arch: Sequence[str],
    node_architectures: Mapping[str, str],
) -> tuple[Reason | None, str]:
    here = facts.size // facts.nodes
    missing = [rank for rank in range(facts.size) if rank // here not in engine.indices]
    if missing:
        return Reason.INCOMPLETE, f"{facts.size - len(missing)} of {facts.size} ranks have published, missing {ranges(missing)}"
    if not facts.transports and not facts.unavailable:
        return Reason.NO_TABLE, (
            f"{engine.url} publishes no parameter memory: install p2p-weightsync[engine] beside its sglang, or start it with "
            "--remote-instance-weight-loader-start-seed-via-transfer-engine"
        )
    if wanted_sglang and (len(wanted_sglang) > 1 or facts.sglang != wanted_sglang[0]):
        return Reason.SGLANG_MISMATCH, f"the engine runs sglang {facts.sglang}, {_wanted('sglang', wanted_sglang, weight_sync.sglang)}"
    leader = engine.leader
    architecture = facts.architecture or (node_architectures.get(leader.node, "") if leader is not None else "")
    if architecture and wanted_arch and (len(wanted_arch) > 1 or architecture != wanted_arch[0]):
        seen = f"the engine has architecture {architecture}"
        return Reason.ARCHITECTURE_MISMATCH, f"{seen}, {_wanted('gpuArchitecture', wanted_arch, weight_sync.architecture)}"
    if weight_sync.transport not in facts.transports:
        why = f" ({facts.unavailable[weight_sync.transport]})" if weight_sync.transport in facts.unavailable else ""
        return Reason.TRANSPORT_MISMATCH, (
            f"the engine publishes over {listing(facts.transports) or 'none'}, spec.transport.backend is {weight_sync.transport}{why}"
        )
    return None, ""


def _wanted(what: str, values: Sequence[str], stated: str) -> str:
    if stated:
        return f"spec.compatibility.{what} is {stated}"
    if len(values) > 1:
        return f"the trainers differ among themselves: {listing(values)}"
    return f"the trainers have {values[0]}"


def ranges(numbers: Sequence[int]) -> str:
    """``8..15, 20`` for sorted numbers."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}..{high}" for low, high in runs)
