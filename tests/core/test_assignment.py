import json
from dataclasses import replace

import pytest

from weightsync_core.assignment import AssignedEngine, Assignment, WeightSyncRef, accept, parse_assignment
from weightsync_core.errors import DocumentError
from weightsync_core.planner import TargetId

ASSIGNMENT = Assignment(
    weight_sync=WeightSyncRef("rl", "qwen", "uid-1"),
    epoch=7,
    trainer="trainer-0",
    engines=(AssignedEngine("engine-0", "pod-uid/2", "http://10.0.0.7:30000", "gen", 2, ("target", "draft")),),
    targets={0: (TargetId("engine-0", "target", 0), TargetId("engine-0", "draft", 0)), 3: (TargetId("engine-0", "target", 1),)},
    transport={"name": "nixl"},
    update={"verify": "digest"},
)


def test_survives_the_way_through_text() -> None:
    assert parse_assignment(ASSIGNMENT.dump()) == ASSIGNMENT
    assert ASSIGNMENT.dump() == parse_assignment(ASSIGNMENT.dump()).dump()


def test_text_does_not_depend_on_the_order_of_mappings() -> None:
    turned = replace(ASSIGNMENT, targets=dict(reversed(list(ASSIGNMENT.targets.items()))))
    assert turned.dump() == ASSIGNMENT.dump()


@pytest.mark.parametrize("field", ["epoch", "trainer", "engines", "targets", "transport", "weightSync"])
def test_one_changed_field_breaks_the_digest(field: str) -> None:
    document = json.loads(ASSIGNMENT.dump())
    document[field] = {"epoch": 8, "trainer": "trainer-1"}.get(field, {})
    with pytest.raises(DocumentError, match="not whole"):
        parse_assignment(json.dumps(document))


def test_unknown_schema_is_refused_with_both_versions() -> None:
    document = json.loads(ASSIGNMENT.dump())
    document["schemaVersion"] = 2
    with pytest.raises(DocumentError, match="schemaVersion 2, this reader knows 1"):
        parse_assignment(json.dumps(document))


@pytest.mark.parametrize("text", ["", "[]", "null", "{", "3"])
def test_what_is_no_document_is_refused(text: str) -> None:
    with pytest.raises(DocumentError):
        parse_assignment(text)


def test_targets_of_engines_that_are_not_listed_are_refused() -> None:
    stray = replace(ASSIGNMENT, targets={0: (TargetId("engine-9", "target", 0),)})
    with pytest.raises(DocumentError, match="engine-9"):
        parse_assignment(stray.dump())


def test_lower_epoch_and_foreign_owner_leave_the_last_good_one() -> None:
    newer = replace(ASSIGNMENT, epoch=8)
    assert accept(ASSIGNMENT, newer.dump()) == newer
    assert accept(newer, newer.dump()) == newer
    with pytest.raises(DocumentError, match="epoch 7, epoch 8 is in force"):
        accept(newer, ASSIGNMENT.dump())
    for foreign in (replace(newer, trainer="trainer-1"), replace(newer, weight_sync=WeightSyncRef("rl", "llama", "uid-1"))):
        with pytest.raises(DocumentError, match="is for trainer"):
            accept(newer, foreign.dump())


def test_a_weightsync_made_anew_replaces_the_old_one_for_good() -> None:
    anew = replace(ASSIGNMENT, epoch=1, weight_sync=WeightSyncRef("rl", "qwen", "uid-2"))
    assert accept(ASSIGNMENT, anew.dump()) == anew
    with pytest.raises(DocumentError, match="uid-1, which was deleted"):
        accept(anew, replace(ASSIGNMENT, epoch=99).dump(), retired=frozenset({"uid-1"}))
