"""What a WeightSync says about itself."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from test_assigning import SYNC, trainers, verdict

from weightsync_operator.compatibility import NoAnswer, Reason, TrainerFacts, ranges
from weightsync_operator.status import EXCLUDED_LIMIT, Condition, Outcome, Why, build_status

ROOT = Path(__file__).parents[2]
NOW = "2026-01-01T00:00:00Z"
GOOD = Outcome(Why.PUBLISHED, "", 3)


def facts(epoch: int = 3, version: str = "v1") -> TrainerFacts:
    return TrainerFacts("p", "0.5.23", "sm_90", epoch, version, "", 1.0)


def conditions(status: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {each["type"]: (each["status"], each["reason"]) for each in status["conditions"]}


def test_all_well() -> None:
    status = build_status(SYNC, [verdict("a")], trainers(1), {"trainer-0": facts()}, GOOD, 1, NOW)
    assert set(conditions(status).values()) == {
        ("True", "Ready"), ("True", "Discovered"), ("True", "Compatible"), ("True", "Published"), ("True", "Connected"),
    }  # fmt: skip
    assert (status["version"], status["epoch"], status["engines"]["summary"]) == ("v1", 3, "1/1")


def test_reasons() -> None:
    odd = [verdict("a"), verdict("b", reason=Reason.SGLANG_MISMATCH)]
    seen = conditions(build_status(SYNC, odd, trainers(1), {"trainer-0": facts()}, GOOD, 1, NOW))
    assert seen[Condition.READY] == ("True", "EnginesExcluded")
    assert seen[Condition.COMPATIBLE] == ("False", "Mismatch")
    seen = conditions(build_status(SYNC, [], trainers(1), {"trainer-0": facts()}, GOOD, 0, NOW))
    assert seen[Condition.READY] == seen[Condition.DISCOVERED] == ("False", "NoEngines")
    seen = conditions(build_status(SYNC, [verdict("a")], [], {}, Outcome(Why.NO_TRAINERS, "", 3), 0, NOW))
    assert seen[Condition.READY] == seen[Condition.CONNECTED] == ("False", "NoTrainers")
    seen = conditions(build_status(SYNC, [verdict("a")], trainers(1), {"trainer-0": facts(2)}, GOOD, 0, NOW))
    assert seen[Condition.READY] == seen[Condition.CONNECTED] == ("False", "Connecting")
    silent = {"trainer-0": NoAnswer(Reason.UNREACHABLE, "no connection")}
    seen = conditions(build_status(SYNC, [verdict("a")], trainers(1), silent, GOOD, 0, NOW))
    assert seen[Condition.COMPATIBLE] == ("Unknown", "NothingToCompare")


def test_transition_times_change_with_the_status_only() -> None:
    first = build_status(SYNC, [verdict("a")], trainers(1), {"trainer-0": facts()}, GOOD, 1, NOW)
    before = replace(SYNC, status=first)
    later = "2026-01-01T00:10:00Z"
    odd = [verdict("a"), verdict("b", reason=Reason.SGLANG_MISMATCH)]
    times = {
        each["type"]: each["lastTransitionTime"]
        for each in build_status(before, odd, trainers(1), {"trainer-0": facts()}, GOOD, 1, later)["conditions"]
    }
    assert times[Condition.READY] == NOW, "still True, for another reason"
    assert times[Condition.COMPATIBLE] == later
    assert build_status(before, [verdict("a")], trainers(1), {"trainer-0": facts()}, GOOD, 1, later) == first


def test_status_stays_bounded() -> None:
    many = [replace(verdict(f"e{index}", reason=Reason.SGLANG_MISMATCH), message="x" * 5000) for index in range(2000)]
    status = build_status(SYNC, many, trainers(1), {"trainer-0": facts()}, GOOD, 0, NOW)
    assert len(status["excludedEngines"]) == EXCLUDED_LIMIT
    assert status["engines"]["excluded"] == 2000
    assert len(repr(status)) < 64 * 1024


def test_a_version_is_remembered_while_trainers_are_away() -> None:
    before = replace(SYNC, status={"version": "v7"})
    assert build_status(before, [], [], {}, Outcome(Why.NO_TRAINERS, "", 3), 0, NOW)["version"] == "v7"


def test_missing_ranks_are_named_in_runs() -> None:
    assert ranges([8, 9, 10, 12, 14, 15]) == "8..10, 12, 14..15"


def test_every_reason_is_documented() -> None:
    text = (ROOT / "docs" / "operator.md").read_text()
    named = set(re.findall(r"^\| `([A-Z]\w+)` \|", text, re.MULTILINE))
    assert named == {reason.value for reason in (*Why, *Reason)} | {condition.value for condition in Condition}
