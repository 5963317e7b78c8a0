"""What watches and lists bring, and what no watch brought."""

from __future__ import annotations

from typing import Any

from weightsync_operator.resources import Key, parse_pod
from weightsync_operator.store import Kind


def body(name: str, version: str, **labels: str) -> dict[str, Any]:
    return {"metadata": {"namespace": "rl", "name": name, "uid": name, "labels": labels, "resourceVersion": version}}


def test_changes_are_told_once_and_only_if_they_matter() -> None:
    told: list[tuple[str, bool, bool]] = []
    pods = Kind(parse_pod, lambda key, before, after: told.append((key.name, before is not None, after is not None)))
    pods.put(body("a", "1"))
    pods.put(body("a", "2"))
    pods.put(body("a", "3", app="x"))
    pods.drop(Key("rl", "a"))
    pods.drop(Key("rl", "a"))
    assert told == [("a", False, True), ("a", True, True), ("a", True, False)]


def test_a_list_replaces_its_namespace() -> None:
    pods = Kind(parse_pod, lambda key, before, after: None)
    other = body("other", "1")
    other["metadata"]["namespace"] = "elsewhere"
    for each in (body("a", "1"), body("b", "1"), other):
        pods.put(each)
    pods.replace("rl", [body("b", "2"), body("c", "1")])
    assert {key.name for key, _ in pods.items()} == {"b", "c", "other"}
    pods.replace("", [])
    assert pods.values() == []


def test_what_no_watch_brought() -> None:
    pods = Kind(parse_pod, lambda key, before, after: None)
    pods.put(body("same", "1"))
    pods.put(body("newer", "1"))
    pods.put(body("gone", "1"))
    listed = [body("same", "1"), body("newer", "2"), body("added", "1")]
    assert {key.name for key in pods.unseen("rl", listed)} == {"newer", "added", "gone"}
    pods.replace("rl", listed)
    assert pods.unseen("rl", listed) == set()
