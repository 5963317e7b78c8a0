import copy
from typing import Any

import pytest

from weightsync_core.errors import DocumentError
from weightsync_core.tables import Identity, Placement, Session, parse_stock_table, parse_table

DOCUMENT: dict[str, Any] = {
    "role": "target",
    "placement": {"rank": 1, "tp_rank": 1, "tp_size": 2},
    "generation": "abc.0",
    "identity": {"sglang": "0.5.23", "torch": "2.14.1", "arch": "cpu"},
    "parameters": {"w": [4096, 12, 2, "bfloat16", [2, 3], [3, 1]], "none": [0, 0, 4, "float32", [0], [1]]},
    "sessions": {"nixl": {"memory": "cpu", "device": 0, "agent": "a", "metadata": "bQ==", "detail": "UCX"}},
    "unavailable": {"mooncake": "no library"},
    "refusal": "",
    "open_session": False,
}


def test_reads_what_the_plugin_publishes() -> None:
    table = parse_table(DOCUMENT)
    assert table.label == "target rank 1"
    assert table.nbytes == 12
    assert table.entries["w"].shape == (2, 3)
    assert table.sessions["nixl"].agent == "a"


@pytest.mark.parametrize("field", list(DOCUMENT))
def test_a_missing_field_is_named(field: str) -> None:
    document = {key: value for key, value in DOCUMENT.items() if key != field}
    with pytest.raises(DocumentError, match=field):
        parse_table(document)


@pytest.mark.parametrize(
    "row", [[4096, 12, 2], [-1, 12, 2, "x", [6], [1]], ["a", 12, 2, "x", [6], [1]], [4096, True, 2, "x", [6], [1]], None]
)
def test_a_malformed_row_is_refused(row: Any) -> None:
    document = copy.deepcopy(DOCUMENT)
    document["parameters"]["w"] = row
    with pytest.raises(DocumentError):
        parse_table(document)


def test_a_size_that_contradicts_its_shape_is_named() -> None:
    document = copy.deepcopy(DOCUMENT)
    document["parameters"]["w"][1] = 14
    with pytest.raises(DocumentError, match=r"w \(14 bytes for shape \[2, 3\]"):
        parse_table(document)


def test_reads_stock_tables_and_refuses_other_rows() -> None:
    session = Session("mooncake", "cuda", 0, address="10.0.0.7:1")
    table = parse_stock_table({"w": [4096, 6, 2]}, Placement(0, 0, 1), session, Identity("0.5.23"), "gen")
    assert table.entries["w"].nbytes == 12
    assert table.entries["w"].shape is None
    with pytest.raises(DocumentError, match="expected"):
        parse_stock_table({"w": [1, 2]}, Placement(0, 0, 1), session, Identity("0.5.23"), "gen")
