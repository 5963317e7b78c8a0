"""Metrics and the HTTP port of a sender."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from weightsync_core.assignment import AssignedEngine, Assignment, WeightSyncRef
from weightsync_devkit.engines import free_port
from weightsync_operator.telemetry import Metrics
from weightsync_sender.report import EngineReport, EngineState, Failure, UpdateReport
from weightsync_sender.telemetry import Recorder
from weightsync_sender.telemetry.server import PortInUse

ROOT = Path(__file__).parents[2]


def assignment(*engines: str, epoch: int = 1) -> Assignment:
    return Assignment(
        weight_sync=WeightSyncRef("rl", "demo", "u"),
        epoch=epoch,
        trainer="t-0",
        engines=tuple(AssignedEngine(name, "u", "http://10.0.0.1:30000", "g", 1) for name in engines),
        targets={0: ()},
    )


def report(version: str = "v1", **states: EngineState) -> UpdateReport:
    engines = {
        name: EngineReport(
            name, state, 100, 100 if state is EngineState.READY else 40, 1, {"write": 0.2, "pause": 0.01},
            failure=None if state is EngineState.READY else Failure.TRANSPORT,
        )
        for name, state in states.items()
    }  # fmt: skip
    return UpdateReport(version, engines, 0.5)


@pytest.fixture
def recorder() -> Recorder:
    made = Recorder("demo", "t-0", {"sglang": "0.5.23", "torch": "2.11", "arch": "cpu"})
    made.assigned(assignment("a", "b"))
    return made


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, {"weightsync": "demo", **labels})


def test_a_good_and_a_failed_engine_are_counted_apart(recorder: Recorder) -> None:
    recorder.began("v1")
    assert recorder.status.updating == "v1"
    recorder.reported(report(a=EngineState.READY, b=EngineState.FENCED), good=False)
    registry = recorder.metrics.registry
    assert value(registry, "p2p_weightsync_engine_write_duration_seconds_count", engine="a") == 1
    assert value(registry, "p2p_weightsync_engine_write_duration_seconds_count", engine="b") == 0
    assert value(registry, "p2p_weightsync_engine_write_failures_total", engine="b", reason="transport") == 1
    assert value(registry, "p2p_weightsync_engine_write_failures_total", engine="a", reason="transport") == 0
    assert value(registry, "p2p_weightsync_engine_updates_behind", engine="b") == 1
    assert value(registry, "p2p_weightsync_engine_write_bytes_total", engine="b") == 40
    assert value(registry, "p2p_weightsync_updates_total", result="failed") == 1
    assert (recorder.status.version, recorder.status.updating) == ("", "")
    recorder.reported(report("v2", a=EngineState.READY, b=EngineState.READY), good=True)
    assert value(registry, "p2p_weightsync_engine_updates_behind", engine="b") == 0
    assert value(registry, "p2p_weightsync_version_info", version="v2") == 1
    assert recorder.status.version == "v2"


def test_series_of_an_engine_that_left_are_gone(recorder: Recorder) -> None:
    recorder.reported(report(a=EngineState.READY, b=EngineState.READY), good=True)
    recorder.assigned(assignment("b", "c", epoch=2))
    text = generate_latest(recorder.metrics.registry).decode()
    assert 'engine="a"' not in text
    assert 'engine="c"' in text
    recorder.reported(report("v2", a=EngineState.READY, b=EngineState.READY), good=True)
    assert 'engine="a"' not in generate_latest(recorder.metrics.registry).decode(), "a report of an engine that left meanwhile"


def test_an_update_that_raises_is_counted_for_every_engine(recorder: Recorder) -> None:
    recorder.raised(KeyboardInterrupt())
    registry = recorder.metrics.registry
    for engine in ("a", "b"):
        assert value(registry, "p2p_weightsync_engine_write_failures_total", engine=engine, reason="interrupted") == 1


def test_the_port_answers(recorder: Recorder) -> None:
    port = free_port()
    recorder.serve(port)
    try:
        base = f"http://127.0.0.1:{port}"
        assert httpx.get(f"{base}/healthz").json() == {"status": "ok"}
        assert httpx.get(f"{base}/identity").json()["identity"]["sglang"] == "0.5.23"
        status = httpx.get(f"{base}/status").json()
        assert (status["epoch"], status["version"]) == (1, "")
        assert "p2p_weightsync_assignment_epoch" in httpx.get(f"{base}/metrics").text
        missing = httpx.get(f"{base}/nothing")
        assert missing.status_code == 404
        assert "/metrics" in missing.text
        with pytest.raises(PortInUse, match="WEIGHTSYNC_PORT"):
            Recorder("demo", "t-1", {}).serve(port)
    finally:
        recorder.close()


def test_every_metric_is_documented(recorder: Recorder) -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    rows = {
        name: (kind, tuple(label for label in labels.split(", ") if label))
        for name, kind, labels in re.findall(r"^\| `(\w+)` \| (\w+) \| ([\w, ]*?) ?\|", text, re.MULTILINE)
    }
    made: dict[str, tuple[str, tuple[str, ...]]] = {}
    for registry in (recorder.metrics.registry, Metrics().registry):
        for collector in list(registry._collector_to_names):
            name = collector._name + ("_total" if collector._type == "counter" else "")
            made[name] = (collector._type, tuple(collector._labelnames))
    assert rows == made
