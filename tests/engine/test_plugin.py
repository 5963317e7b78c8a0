"""The plugin in real engines: what it publishes, costs, guards, and what it leaves alone."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from weightsync_core.errors import UpdateFailed
from weightsync_devkit import zoo
from weightsync_devkit.engines import EngineProcess, Engines
from weightsync_devkit.oracle import differences, held_by
from weightsync_sender import CheckpointSource, EngineState, SenderSettings, UpdateReport, Verify, WeightSender

pytestmark = pytest.mark.engines


def push(engine: EngineProcess, folder: Path, **settings: object) -> UpdateReport:
    with WeightSender(engines=[engine.url], config=folder, settings=SenderSettings(**settings)) as sender:  # type: ignore[arg-type]
        return sender.update(CheckpointSource(folder), folder.parent.name)


def refused(engine: EngineProcess, folder: Path, **settings: object) -> str:
    """The reason why an engine is not written; it must stay untouched."""
    before, version = engine.checksums(), engine.version()
    with pytest.raises(UpdateFailed) as caught:
        push(engine, folder, **settings)
    report = caught.value.report
    assert isinstance(report, UpdateReport)
    (one,) = report.engines.values()
    assert one.state is EngineState.SKIPPED
    assert (engine.checksums(), engine.version()) == (before, version)
    assert not engine.is_paused()
    return one.error


def test_an_idle_engine_costs_nothing_and_an_open_update_ends_its_polling(engines: Engines, checkpoint: Callable[..., Path]) -> None:
    with engines.running((checkpoint("qwen3", 1),), transports="nixl") as (published,):
        push(published, checkpoint("qwen3", 2), transport="nixl")
        with engines.running((checkpoint("qwen3", 1),), transports="none") as (silent,):
            time.sleep(2)
            cost = {name: _cpu_of(engine, 4.0) for name, engine in (("published", published), ("silent", silent))}
    assert cost["published"] - cost["silent"] < 0.02, cost


def _cpu_of(engine: EngineProcess, seconds: float) -> float:
    """Cores that all processes of an engine use."""

    def spent() -> float:
        total = 0
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                try:
                    if os.getpgid(int(entry)) == engine.pid:
                        fields = Path(f"/proc/{entry}/stat").read_text().rsplit(")", 1)[1].split()
                        total += int(fields[11]) + int(fields[12])
                except (ProcessLookupError, FileNotFoundError):
                    continue
        return total / os.sysconf("SC_CLK_TCK")

    before = spent()
    time.sleep(seconds)
    return (spent() - before) / seconds


def test_routes_and_live_calls_are_guarded_by_the_engines_key(engines: Engines, checkpoint: Callable[..., Path]) -> None:
    a, b = checkpoint("qwen3", 1), checkpoint("qwen3", 2)
    engine = engines.start(a, "--api-key", "secret")
    deadline = time.monotonic() + 120
    while True:
        try:
            if httpx.get(f"{engine.url}/model_info", headers={"Authorization": "Bearer secret"}).status_code == 200:
                break
        except httpx.HTTPError:
            assert time.monotonic() < deadline
        time.sleep(0.2)
    for method, path in (
        ("GET", "/p2p_weightsync/identity"),
        ("POST", "/p2p_weightsync/lease"),
        ("DELETE", "/p2p_weightsync/lease?owner=x"),
    ):
        assert httpx.request(method, engine.url + path, json={"owner": "x", "seconds": 1} if method == "POST" else None).status_code == 401
    with WeightSender(engines=[engine.url], config=b) as sender, pytest.raises(UpdateFailed, match="wants an API key"):
        sender.update(CheckpointSource(b), "b")
    with WeightSender(engines=[engine.url], config=b, api_key="secret") as sender:
        assert sender.update(CheckpointSource(b), "b").ready == 1
    engines.stop(engine)


def test_an_engine_of_the_other_transport_is_refused(engines: Engines, checkpoint: Callable[..., Path]) -> None:
    with engines.running((checkpoint("qwen3", 1),), transports="mooncake") as (engine,):
        assert "publishes over mooncake, nixl was asked for" in refused(engine, checkpoint("qwen3", 2), transport="nixl")


def test_a_transport_that_cannot_start_leaves_the_engine_serving_and_says_why(engines: Engines, checkpoint: Callable[..., Path]) -> None:
    with engines.running((checkpoint("qwen3", 1),), transports="mooncake,nixl", SGLANG_REMOTE_INSTANCE_NIXL_BACKEND="NOPE") as (engine,):
        assert "backend 'NOPE' could not be made" in refused(engine, checkpoint("qwen3", 2), transport="nixl")
        assert push(engine, checkpoint("qwen3", 2), transport="mooncake").ready == 1


def test_a_stock_engine_is_written_over_mooncake_and_what_is_missing_is_said(engines: Engines, checkpoint: Callable[..., Path]) -> None:
    a, b = checkpoint("qwen3_moe_fp8", 1), checkpoint("qwen3_moe_fp8", 2)
    seeding = "--remote-instance-weight-loader-start-seed-via-transfer-engine"
    with engines.running((a, "--tp", "2", seeding), (b, "--tp", "2", seeding), transports="none") as (engine, fresh):
        report = push(engine, b, verify=Verify.DIGEST)
        assert differences(held_by(engine), held_by(fresh)) == []
        (one,) = report.engines.values()
        assert any("two senders at once cannot be kept apart" in note for note in one.notes)
        assert "without it only mooncake is published" in refused(engine, b, transport="nixl")


def test_checksums_of_a_stock_engine_find_a_wrong_byte(
    engines: Engines, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from weightsync_sender import verify

    a, b = checkpoint("qwen3", 1), checkpoint("qwen3", 2)
    original = verify._make_checksums

    def spoiled(ranks: object, tensors: Iterator, device: object) -> object:  # type: ignore[type-arg]
        return original(ranks, ((name, t + 1 if name == "model.norm.weight" else t) for name, t in tensors), device)  # type: ignore[arg-type]

    seeding = "--remote-instance-weight-loader-start-seed-via-transfer-engine"
    with engines.running((a, seeding), transports="none") as (engine,):
        monkeypatch.setattr(verify, "_make_checksums", spoiled)
        with pytest.raises(UpdateFailed, match=r"other values than were written: target rank 0 model\.norm\.weight"):
            push(engine, b, verify=Verify.DIGEST)
        assert engine.is_paused()


def test_an_engine_without_plugin_and_without_seeding_is_refused(engines: Engines, checkpoint: Callable[..., Path]) -> None:
    with engines.running((checkpoint("qwen3", 1),), transports="none") as (engine,):
        assert "publishes no parameter memory" in refused(engine, checkpoint("qwen3", 2))


@pytest.mark.parametrize("name", [name for name, family in zoo.ZOO.items() if family.draft])
@pytest.mark.parametrize("transport", ["mooncake", "nixl"])
def test_the_draft_of_the_same_checkpoint_is_written_with_the_target(
    name: str, transport: str, engines: Engines, checkpoint: Callable[..., Path]
) -> None:
    a, b = checkpoint(name, 1), checkpoint(name, 2)
    eagle = (
        "--speculative-algorithm",
        "EAGLE",
        "--speculative-num-steps",
        "1",
        "--speculative-eagle-topk",
        "1",
        "--speculative-num-draft-tokens",
        "2",
    )
    with engines.running((a, *eagle), (b, *eagle)) as (engine, fresh):
        roles = {table["role"] for table in engine.table()}
        assert roles == {"target", "draft"}
        report = push(engine, b, transport=transport, verify=Verify.DIGEST)
        assert next(iter(report.engines.values())).targets == 2
        expected = held_by(fresh, generate=False)
        assert any(key.startswith("draft.") for key in expected.checksums[0])
        assert differences(held_by(engine, generate=False), expected) == []


def test_an_engine_that_gave_up_its_weight_memory_is_refused_and_counts_as_new_afterwards(
    engines: Engines, checkpoint: Callable[..., Path]
) -> None:
    a, b = checkpoint("qwen3", 1), checkpoint("qwen3", 2)
    with engines.running((a,)) as (engine,):
        generation = engine.table()[0]["generation"]
        assert engine.post("/release_memory_occupation", tags=["weights"]).status_code == 200
        with WeightSender(engines=[engine.url], config=b) as sender:
            with pytest.raises(UpdateFailed, match="weight memory is released"):
                sender.update(CheckpointSource(b), "b")
            assert engine.post("/resume_memory_occupation", tags=["weights"]).status_code == 200
            assert engine.table()[0]["generation"] != generation
            assert sender.update(CheckpointSource(b), "b").ready == 1
