"""Pods become trainers and engines; two WeightSyncs never share one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from test_assigning import GROUP, SYNC, pod

from weightsync_operator.discovery import find_engines, find_trainers, natural, owners
from weightsync_operator.resources import EngineGroup, Expression, Key, Selector

LWS = EngineGroup("lws", Selector({"app": "engine"}, ()), 30000, "group", "index", 0)


def test_trainers_come_in_rank_order() -> None:
    pods = [pod(f"trainer-{index}", labels={"app": "trainer"}) for index in (10, 2, 1)]
    assert [each.key.name for each in find_trainers(SYNC, pods)] == ["trainer-1", "trainer-2", "trainer-10"]
    assert natural("a-2") < natural("a-10") < natural("b-1")


@pytest.mark.parametrize(
    "changes",
    [{"deleting": True}, {"phase": "Failed"}, {"phase": "Succeeded"}, {"labels": {"app": "other"}}, {"key": Key("elsewhere", "a")}],
)
def test_what_is_no_engine_any_more(changes: dict[str, Any]) -> None:
    assert [engine.id for engine in find_engines(SYNC, [pod("a"), pod("b")])] == ["a", "b"]
    assert find_engines(SYNC, [pod("a", **changes)]) == []


def test_an_address_and_an_identity() -> None:
    (engine,) = find_engines(SYNC, [pod("a", ip="fd00::1")])
    assert engine.url == "http://[fd00::1]:30000"
    (restarted,) = find_engines(SYNC, [pod("a", ip="fd00::1", restarts=1)])
    assert engine.uid != restarted.uid
    (without,) = find_engines(SYNC, [pod("a", ip="")])
    assert without.url == ""


def test_pods_of_a_group_are_one_engine() -> None:
    sync = replace(SYNC, groups=(LWS,))
    labels = {"app": "engine", "group": "g"}
    members = [pod(f"p{index}", labels={**labels, "index": str(index)}) for index in (2, 0, 1)]
    (engine,) = find_engines(sync, members)
    assert (engine.id, engine.indices) == ("p0", (0, 1, 2))
    (headless,) = find_engines(sync, members[:1])
    assert (headless.id, headless.leader, headless.url) == ("g", None, "")
    (stray,) = find_engines(sync, [pod("stray")])
    assert (stray.id, stray.leader) == ("stray", None)


def test_a_pod_that_two_groups_select_belongs_to_the_first() -> None:
    both = replace(SYNC, groups=(GROUP, replace(GROUP, name="second", port=1)))
    (engine,) = find_engines(both, [pod("a")])
    assert engine.group.name == "rollout"


def test_the_older_weightsync_has_an_engine() -> None:
    young = replace(SYNC, key=Key("rl", "young"), uid="u2", created="2026-01-02T00:00:00Z")
    found = {each.key: find_engines(each, [pod("a")]) for each in (young, SYNC)}
    assert owners([young, SYNC], found) == {"uid-a": SYNC.key}


@pytest.mark.parametrize(
    ("expression", "matches"),
    [
        (Expression("app", "In", frozenset({"engine", "x"})), True),
        (Expression("app", "NotIn", frozenset({"engine"})), False),
        (Expression("absent", "NotIn", frozenset({"x"})), True),
        (Expression("app", "Exists", frozenset()), True),
        (Expression("app", "DoesNotExist", frozenset()), False),
    ],
)
def test_selectors_are_those_of_kubernetes(expression: Expression, matches: bool) -> None:
    assert Selector({}, (expression,)).matches({"app": "engine"}) is matches
    assert not Selector({}, ()).matches({"app": "engine"})
