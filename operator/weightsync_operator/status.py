"""What a WeightSync says about itself: conditions, counts, excluded engines. Pure, and rebuilt from scratch each time.

Conditions and their reasons are documented in docs/operator.md; a test compares both lists.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from weightsync_core.errors import listing
from weightsync_operator.compatibility import MISMATCHES, NoAnswer, Reason, TrainerFacts, Verdict
from weightsync_operator.resources import OnMismatch, Pod, WeightSync

EXCLUDED_LIMIT = 32
_MESSAGE_LIMIT, _NAMES = 1024, 5


class Condition(StrEnum):
    """Types of conditions."""

    READY = "Ready"
    DISCOVERED = "EnginesDiscovered"
    COMPATIBLE = "EnginesCompatible"
    PUBLISHED = "AssignmentsPublished"
    CONNECTED = "TrainersConnected"


class Why(StrEnum):
    """Reasons of conditions."""

    READY = "Ready"
    EXCLUDED = "EnginesExcluded"
    DISCOVERED = "Discovered"
    NO_ENGINES = "NoEngines"
    NONE_ANSWERING = "NoneAnswering"
    COMPATIBLE = "Compatible"
    MISMATCH = "Mismatch"
    BLOCKED = "Blocked"
    UNKNOWN = "NothingToCompare"
    PUBLISHED = "Published"
    NO_TRAINERS = "NoTrainers"
    SUSPENDED = "Suspended"
    TOO_LARGE = "AssignmentTooLarge"
    WRITE_FAILED = "WriteFailed"
    CONNECTED = "Connected"
    CONNECTING = "Connecting"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the hand-off of assignments ended."""

    reason: Why
    message: str
    epoch: int
    """In force; 0 for none."""


def build_status(
    weight_sync: WeightSync,
    verdicts: Sequence[Verdict],
    trainers: Sequence[Pod],
    answers: Mapping[str, TrainerFacts | NoAnswer],
    outcome: Outcome,
    synced: int,
    now: str,
) -> dict[str, Any]:
    """The status document.

    Args:
        answers: by trainer pod name.
        synced: engines that serve what their trainer brought last.
        now: RFC 3339, for conditions whose status changed.
    """
    facts = [answer for answer in answers.values() if isinstance(answer, TrainerFacts)]
    connected = [pod for pod in trainers if _holds(answers.get(pod.key.name), outcome.epoch)]
    included = sum(verdict.included for verdict in verdicts)
    conditions = {
        Condition.DISCOVERED: _discovered(verdicts),
        Condition.COMPATIBLE: _compatible(weight_sync, verdicts, facts),
        Condition.PUBLISHED: (outcome.reason is Why.PUBLISHED, outcome.reason, outcome.message),
        Condition.CONNECTED: _connected(trainers, connected, answers, outcome),
    }
    ready = _ready(conditions, verdicts, included)
    excluded = [verdict for verdict in verdicts if not verdict.included]
    newest = max(facts, key=lambda trainer: trainer.updated_at, default=None)
    status: dict[str, Any] = {
        "observedGeneration": weight_sync.generation,
        "epoch": outcome.epoch,
        "engines": {
            "summary": f"{included}/{len(verdicts)}",
            "found": len(verdicts),
            "assigned": included,
            "synced": synced,
            "excluded": len(excluded),
        },
        "trainers": {"summary": f"{len(connected)}/{len(trainers)}", "found": len(trainers), "connected": len(connected)},
        "excludedEngines": [
            {"engine": verdict.engine.id, "reason": str(verdict.reason), "message": verdict.message[:_MESSAGE_LIMIT]}
            for verdict in excluded[:EXCLUDED_LIMIT]
        ],
        "conditions": [_condition(weight_sync, kind, state, now) for kind, state in {Condition.READY: ready, **conditions}.items()],
    }
    version = newest.version if newest is not None and newest.version else weight_sync.status.get("version", "")
    if version:
        status["version"] = version[:256]
    return status


_State = tuple[bool | None, Why, str]


def _ready(conditions: Mapping[Condition, _State], verdicts: Sequence[Verdict], included: int) -> _State:
    for kind in (Condition.PUBLISHED, Condition.DISCOVERED, Condition.CONNECTED):
        holds, reason, message = conditions[kind]
        if not holds:
            return False, reason, message
    if not included:
        return False, Why.NO_ENGINES, f"none of {len(verdicts)} engines can be written: {_first(verdicts)}"
    if included < len(verdicts):
        return True, Why.EXCLUDED, f"{included} of {len(verdicts)} engines get weights; {_first(verdicts)}"
    return True, Why.READY, f"all {included} engines get weights"


def _discovered(verdicts: Sequence[Verdict]) -> _State:
    if not verdicts:
        return False, Why.NO_ENGINES, "no running pod matches a selector of spec.engineGroups"
    answering = sum(verdict.facts is not None for verdict in verdicts)
    if not answering:
        return False, Why.NONE_ANSWERING, f"none of {len(verdicts)} engines answers: {_first(verdicts)}"
    return True, Why.DISCOVERED, f"{answering} of {len(verdicts)} engines answer"


def _compatible(weight_sync: WeightSync, verdicts: Sequence[Verdict], trainers: Sequence[TrainerFacts]) -> _State:
    other = [verdict for verdict in verdicts if verdict.reason in MISMATCHES]
    if other:
        reason = Why.BLOCKED if weight_sync.on_mismatch is OnMismatch.BLOCK else Why.MISMATCH
        return False, reason, f"{len(other)} of {len(verdicts)} engines do not match; {_first(other)}"
    if not any(verdict.facts is not None for verdict in verdicts):
        return None, Why.UNKNOWN, "no engine has answered yet"
    if not trainers and not (weight_sync.sglang and weight_sync.architecture):
        return None, Why.UNKNOWN, "no trainer has answered yet; senders check their engines themselves"
    return True, Why.COMPATIBLE, "all engines that answer match"


def _connected(
    trainers: Sequence[Pod], connected: Sequence[Pod], answers: Mapping[str, TrainerFacts | NoAnswer], outcome: Outcome
) -> _State:
    if not trainers:
        return False, Why.NO_TRAINERS, "no running pod matches spec.trainer.selector; engines stay as they are"
    waiting = [pod for pod in trainers if pod not in connected]
    if not waiting:
        return True, Why.CONNECTED, f"all {len(trainers)} trainer pods hold epoch {outcome.epoch}"
    words = [f"{pod.key.name}: {_words(answers.get(pod.key.name))}" for pod in waiting]
    return False, Why.CONNECTING, f"{len(connected)} of {len(trainers)} trainer pods hold epoch {outcome.epoch}; {listing(words, _NAMES)}"


def _holds(answer: TrainerFacts | NoAnswer | None, epoch: int) -> bool:
    return isinstance(answer, TrainerFacts) and answer.epoch == epoch


def _words(answer: TrainerFacts | NoAnswer | None) -> str:
    if answer is None:
        return "not asked yet"
    if isinstance(answer, NoAnswer):
        return answer.message
    return f"holds epoch {answer.epoch}" if answer.epoch >= 0 else "holds no assignment"


def _first(verdicts: Sequence[Verdict]) -> str:
    words = [f"{verdict.engine.id}: {verdict.reason}: {verdict.message}" for verdict in verdicts if not verdict.included]
    return listing(words, _NAMES)


def _condition(weight_sync: WeightSync, kind: Condition, state: _State, now: str) -> dict[str, Any]:
    holds, reason, message = state
    status = "Unknown" if holds is None else str(holds)
    before = next((known for known in weight_sync.status.get("conditions") or () if known["type"] == kind), None)
    return {
        "type": str(kind),
        "status": status,
        "observedGeneration": weight_sync.generation,
        "lastTransitionTime": before["lastTransitionTime"] if before is not None and before["status"] == status else now,
        "reason": str(reason),
        "message": message[:_MESSAGE_LIMIT],
    }


def excluded_reasons(verdicts: Sequence[Verdict]) -> dict[Reason, int]:
    """Engines by reason of exclusion."""
    return Counter(verdict.reason for verdict in verdicts if verdict.reason is not None)
