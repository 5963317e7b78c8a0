"""One update on real engines: several at once, what is refused, what fails, and that nothing is left paused."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file

from weightsync_core.errors import BufferTooSmall, SourceError, UpdateFailed
from weightsync_core.protocol import LEASE_ROUTE, OWNER_HEADER
from weightsync_devkit import zoo
from weightsync_devkit.engines import EngineProcess, Engines
from weightsync_devkit.oracle import differences, held_by
from weightsync_sender import (
    CheckpointSource,
    EngineState,
    PauseMode,
    SenderSettings,
    TensorMeta,
    Timeouts,
    UpdateReport,
    Verify,
    WeightSender,
)
from weightsync_sender.settings import SettingsError
from weightsync_sender.sources import MemorySource

pytestmark = pytest.mark.engines

MODEL = "qwen3_moe"


@pytest.fixture(scope="module")
def pair(engines: Engines, checkpoint: Callable[..., Path]) -> Iterator[tuple[EngineProcess, EngineProcess]]:
    """Two engines of one model, tp 2 and tp 1."""
    a = checkpoint(MODEL, 1)
    with engines.running((a, "--tp", "2"), (a,)) as (two, one):
        yield two, one


@pytest.fixture(scope="module")
def fresh(engines: Engines, checkpoint: Callable[..., Path]) -> Iterator[tuple[Any, Any]]:
    """What engines hold that were started from the second checkpoint, tp 2 and tp 1."""
    b = checkpoint(MODEL, 2)
    with engines.running((b, "--tp", "2"), (b,)) as (two, one):
        yield held_by(two), held_by(one)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def sender_for(*engines: EngineProcess, config: Path, **settings: Any) -> WeightSender:
    return WeightSender(engines=[engine.url for engine in engines], config=config, settings=SenderSettings(**settings))


def serves(engine: EngineProcess, version: str) -> bool:
    return engine.version() == version and not engine.is_paused()


@pytest.mark.parametrize("transport", ["mooncake", "nixl"])
def test_one_push_fills_two_engines_of_different_layout(
    transport: str, pair: tuple[EngineProcess, EngineProcess], fresh: tuple[Any, Any], checkpoint: Callable[..., Path]
) -> None:
    a, b = checkpoint(MODEL, 1), checkpoint(MODEL, 2)
    with sender_for(*pair, config=b, transport=transport) as sender:
        sender.update(CheckpointSource(a), "a")
        report = sender.update(CheckpointSource(b), "b")
    assert report.ready == 2
    assert all(engine.transport.startswith(transport) for engine in report.engines.values())
    for engine, expected in zip(pair, fresh, strict=True):
        assert differences(held_by(engine), expected) == []
        assert serves(engine, "b")


def test_a_trainers_own_tensors_go_as_mapping_list_or_iterator(
    pair: tuple[EngineProcess, EngineProcess], fresh: tuple[Any, Any], checkpoint: Callable[..., Path]
) -> None:
    tensors, other = tensors_of(checkpoint(MODEL, 2)), tensors_of(checkpoint(MODEL, 3))
    _, one = pair
    with sender_for(one, config=checkpoint(MODEL, 1)) as sender:
        for give in (tensors, list(tensors.items()), iter(tensors.items())):
            sender.update(other, "other")
            sender.update(give, 7)
            assert differences(held_by(one), fresh[1]) == []
            assert one.version() == "7"


@pytest.mark.parametrize("transport", ["mooncake", "nixl"])
def test_buffers_from_one_block_to_everything(
    transport: str, pair: tuple[EngineProcess, EngineProcess], fresh: tuple[Any, Any], checkpoint: Callable[..., Path]
) -> None:
    b, c = checkpoint(MODEL, 2), checkpoint(MODEL, 3)
    with sender_for(*pair, config=b, transport=transport, buffer_size=100) as sender, pytest.raises(BufferTooSmall) as caught:
        sender.update(CheckpointSource(b), "b")
    assert not any(engine.is_paused() for engine in pair)
    assert str(caught.value.needed) in str(caught.value)
    for size in (caught.value.needed, 3 * caught.value.needed, 1 << 20, 64 << 20):
        with sender_for(*pair, config=b, transport=transport, buffer_size=size) as sender:
            sender.update(CheckpointSource(c), "c")
            sender.update(CheckpointSource(b), "b")
        for engine, expected in zip(pair, fresh, strict=True):
            assert differences(held_by(engine), expected) == []


def dropped(t: dict[str, torch.Tensor]) -> str:
    del t["model.layers.1.mlp.experts.2.up_proj.weight"]
    return "model.layers.1.mlp.experts.2.up_proj.weight"


def renamed(t: dict[str, torch.Tensor]) -> str:
    t["model.layers.0.self_attn.quer_proj.weight"] = t.pop("model.layers.0.self_attn.q_proj.weight")
    return "model.layers.0.self_attn.q_proj.weight"


def half_fused(t: dict[str, torch.Tensor]) -> str:
    del t["model.layers.1.self_attn.v_proj.weight"]
    return "model.layers.1.self_attn.v_proj.weight"


def wrong_shape(t: dict[str, torch.Tensor]) -> str:
    t["model.layers.0.self_attn.o_proj.weight"] = torch.zeros(64, 32, dtype=torch.bfloat16)
    return "model.layers.0.self_attn.o_proj.weight"


def too_many_rows(t: dict[str, torch.Tensor]) -> str:
    t["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(128, 64, dtype=torch.bfloat16)
    return "model.layers.0.self_attn.q_proj.weight"


def wrong_dtype(t: dict[str, torch.Tensor]) -> str:
    t["model.norm.weight"] = t["model.norm.weight"].float()
    return "model.norm.weight"


def integer_dtype(t: dict[str, torch.Tensor]) -> str:
    t["lm_head.weight"] = t["lm_head.weight"].to(torch.int32)
    return "lm_head.weight"


def surplus(t: dict[str, torch.Tensor]) -> str:
    t["model.layers.9.input_layernorm.weight"] = t["model.norm.weight"]
    return "model.layers.9.input_layernorm.weight"


@pytest.mark.parametrize("spoil", [dropped, renamed, half_fused, wrong_shape, too_many_rows, wrong_dtype, integer_dtype, surplus])
def test_tensors_that_do_not_fit_are_named_and_nothing_is_written(
    spoil: Callable[[dict[str, torch.Tensor]], str], pair: tuple[EngineProcess, EngineProcess], checkpoint: Callable[..., Path]
) -> None:
    before = [(held_by(engine), engine.version()) for engine in pair]
    tensors = tensors_of(checkpoint(MODEL, 4))
    name = spoil(tensors)
    with sender_for(*pair, config=checkpoint(MODEL, 1)) as sender, pytest.raises(SourceError, match=re.escape(name)):
        sender.update(tensors, "never")
    for engine, (held, version) in zip(pair, before, strict=True):
        assert differences(held_by(engine), held) == []
        assert serves(engine, version)


def test_rounding_is_possible_where_it_is_allowed(pair: tuple[EngineProcess, EngineProcess], checkpoint: Callable[..., Path]) -> None:
    tensors = {name: tensor.float() for name, tensor in tensors_of(checkpoint(MODEL, 3)).items()}
    with sender_for(*pair, config=checkpoint(MODEL, 1), allow_cast=True, verify=Verify.DIGEST) as sender:
        assert sender.update(tensors, "rounded").ready == 2


@pytest.mark.parametrize("version", ["", None, "a\nb", "v" * 300, "v\udcff"])
def test_a_version_that_cannot_be_published_is_an_error(version: Any, checkpoint: Callable[..., Path]) -> None:
    with (
        WeightSender(engines=["127.0.0.1:1"], config=checkpoint(MODEL, 1)) as sender,
        pytest.raises(SourceError, match="the version"),
    ):
        sender.update(CheckpointSource(checkpoint(MODEL, 1)), version)


def test_what_cannot_work_is_refused_when_the_sender_is_made() -> None:
    with pytest.raises(SettingsError, match="minimum_engines is 9, 1 engines were given"):
        WeightSender(engines=["127.0.0.1:1"], settings=SenderSettings(minimum_engines=9))
    with pytest.raises(SettingsError, match="no HTTP header"):
        WeightSender(engines=["127.0.0.1:1"], api_key="ü")
    sender = WeightSender(engines=["127.0.0.1:1"])
    sender.close()
    with pytest.raises(SettingsError, match="was closed"):
        sender.update({"w": torch.zeros(1)}, "1")


def test_zero_tensors_are_an_error(pair: tuple[EngineProcess, EngineProcess], checkpoint: Callable[..., Path]) -> None:
    with sender_for(*pair, config=checkpoint(MODEL, 1)) as sender:
        for nothing in ({}, [], iter(())):
            with pytest.raises(SourceError, match="no tensors"):
                sender.update(nothing, "nothing")


def test_an_engine_of_another_model_is_skipped_and_the_minimum_decides(
    pair: tuple[EngineProcess, EngineProcess], engines: Engines, checkpoint: Callable[..., Path]
) -> None:
    b = checkpoint(MODEL, 2)
    _, one = pair
    with engines.running((checkpoint("qwen3", 1),)) as (stranger,):
        with sender_for(one, stranger, config=b, minimum_engines=1) as sender:
            report = sender.update(CheckpointSource(b), "b1")
        assert report.engines[one.url].state is EngineState.READY
        assert report.engines[stranger.url].state is EngineState.SKIPPED
        assert "differs from the model built here" in report.engines[stranger.url].error
        assert serves(stranger, "default")
        with (
            sender_for(one, stranger, config=b) as sender,
            pytest.raises(UpdateFailed, match="1 of 2 engines serve version b2, at least 2 must"),
        ):
            sender.update(CheckpointSource(b), "b2")


def test_a_table_whose_entry_has_another_size_is_refused_with_both_numbers(
    pair: tuple[EngineProcess, EngineProcess], checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """The checkpoint's config says another vocabulary than the engine was started with."""
    config, tensors = zoo.make(MODEL, 1)
    config["vocab_size"] = 320
    tensors["lm_head.weight"] = torch.zeros(320, 64, dtype=torch.bfloat16)
    tensors["model.embed_tokens.weight"] = torch.zeros(320, 64, dtype=torch.bfloat16)
    other = zoo.save(tmp_path / "other", config, tensors)
    _, one = pair
    version = one.version()
    with sender_for(one, config=other) as sender, pytest.raises(UpdateFailed) as caught:
        sender.update(CheckpointSource(other), "never")
    assert "lm_head.weight: the engine has 32768 bytes, the replica 40960" in str(caught.value)
    assert serves(one, version)


@pytest.mark.parametrize("mode", list(PauseMode))
def test_running_requests_survive_or_end_as_the_pause_mode_says(
    mode: PauseMode, pair: tuple[EngineProcess, EngineProcess], checkpoint: Callable[..., Path]
) -> None:
    _, one = pair
    answers: list[Any] = []
    worker = threading.Thread(
        target=lambda: answers.append(
            one.post("/generate", input_ids=[5, 6, 7], sampling_params={"max_new_tokens": 300, "ignore_eos": True}).json()
        )
    )
    worker.start()
    time.sleep(0.5)
    with sender_for(one, config=checkpoint(MODEL, 1), pause_mode=mode) as sender:
        sender.update(CheckpointSource(checkpoint(MODEL, 2)), f"during-{mode.value}")
    worker.join(60)
    assert serves(one, f"during-{mode.value}")
    (answer,) = answers
    finished = answer["meta_info"]["finish_reason"]["type"]
    assert finished == ("abort" if mode is PauseMode.ABORT else "length")


class Flipped:
    """Writes one byte of one rank wrong, after the sums were taken."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, engine: EngineProcess) -> None:
        from weightsync_sender import verify

        original = verify.verify_digests

        def spoiled(client: Any, tables: Any, *args: Any) -> None:
            table = next(table for table in tables if table.placement.rank == 1)
            address = table.entries["model.norm.weight"].address
            pid = engine_pid_holding(engine, address)
            with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
                memory.seek(address + 17)
                byte = memory.read(1)
                memory.seek(address + 17)
                memory.write(bytes([byte[0] ^ 1]))
            original(client, tables, *args)

        monkeypatch.setattr(verify, "verify_digests", spoiled)


def engine_pid_holding(engine: EngineProcess, address: int) -> int:
    """The scheduler process of rank 1."""
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                if os.getpgid(int(entry)) != engine.pid:
                    continue
                title = Path(f"/proc/{entry}/cmdline").read_bytes() + Path(f"/proc/{entry}/comm").read_bytes()
            except (ProcessLookupError, FileNotFoundError, PermissionError):
                continue
            if b"TP1" in title:
                return int(entry)
    raise AssertionError("no scheduler of rank 1 found")


def test_digest_verification_names_the_tensor_when_one_byte_of_one_rank_is_flipped(
    pair: tuple[EngineProcess, EngineProcess], checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    two, _ = pair
    b = checkpoint(MODEL, 2)
    with sender_for(two, config=b, verify=Verify.DIGEST) as sender:
        with monkeypatch.context() as patch:
            Flipped(patch, two)
            with pytest.raises(UpdateFailed, match=re.escape("target rank 1 model.norm.weight")) as caught:
                sender.update(CheckpointSource(b), "flipped")
        report = caught.value.report
        assert isinstance(report, UpdateReport)
        assert report.engines[two.url].state is EngineState.FENCED
        assert two.is_paused(), "a fenced engine must not serve"
        assert sender.update(CheckpointSource(b), "mended").ready == 1
    assert serves(two, "mended")


def test_snapshot_verification_passes_for_an_update_and_fails_for_one_that_writes_nothing(
    pair: tuple[EngineProcess, EngineProcess], fresh: tuple[Any, Any], checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    b = checkpoint(MODEL, 2)
    with sender_for(*pair, config=b, transport="nixl", verify=Verify.SNAPSHOT) as sender:
        assert sender.update(CheckpointSource(b), "proven").ready == 2
        for engine, expected in zip(pair, fresh, strict=True):
            assert differences(held_by(engine), expected) == []
        with monkeypatch.context() as patch:
            from weightsync_sender.transports import WriteState, nixl

            class Nothing:
                error = ""

                def poll(self) -> WriteState:
                    return WriteState.DONE

            patch.setattr(nixl._NixlConnection, "post", lambda connection, pieces, memory: Nothing())
            with pytest.raises(UpdateFailed, match="check tensor equality failed"):
                sender.update(CheckpointSource(b), "no-op")
        assert sender.update(CheckpointSource(b), "real").ready == 2


def test_an_engine_killed_while_it_is_written_does_not_stop_the_others(
    engines: Engines, fresh: tuple[Any, Any], checkpoint: Callable[..., Path]
) -> None:
    a, b = checkpoint(MODEL, 1), checkpoint(MODEL, 2)
    for transport in ("mooncake", "nixl"):
        with engines.running((a, "--tp", "2"), (a,)) as (victim, other):
            source = Midway(b, lambda victim=victim: victim.kill(signal.SIGKILL))
            timeouts = Timeouts(write=3.0)
            with (
                sender_for(victim, other, config=b, transport=transport, timeouts=timeouts) as sender,
                pytest.raises(UpdateFailed) as caught,
            ):
                sender.update(source, "b")
            report = caught.value.report
            assert isinstance(report, UpdateReport)
            assert report.engines[victim.url].state is EngineState.GONE
            assert report.engines[other.url].state is EngineState.READY
            assert differences(held_by(other), fresh[1]) == []
            assert serves(other, "b")


def test_an_engine_stopped_while_it_is_written_is_fenced_in_time_and_mended_by_the_next_update(
    engines: Engines, fresh: tuple[Any, Any], checkpoint: Callable[..., Path]
) -> None:
    a, b = checkpoint(MODEL, 1), checkpoint(MODEL, 2)
    with engines.running((a, "--tp", "2"), (a,)) as (hung, other):
        source = Midway(b, lambda: hung.kill(signal.SIGSTOP))
        timeouts = Timeouts(write=2.0, resume=2.0, end=5.0, begin=5.0)
        with sender_for(hung, other, config=b, transport="nixl", timeouts=timeouts) as sender:
            started = time.monotonic()
            with pytest.raises(UpdateFailed) as caught:
                sender.update(source, "b")
            assert time.monotonic() - started < 40
            report = caught.value.report
            assert isinstance(report, UpdateReport)
            assert report.engines[hung.url].state in (EngineState.FENCED, EngineState.GONE)
            assert report.engines[other.url].state is EngineState.READY
            hung.kill(signal.SIGCONT)
            deadline = time.monotonic() + 60
            while True:
                try:
                    sender.update(CheckpointSource(b), "again")
                    break
                except UpdateFailed:
                    assert time.monotonic() < deadline
                    time.sleep(0.5)
        assert differences(held_by(hung), fresh[0]) == []
        assert serves(hung, "again")


class Midway:
    """A checkpoint that does something in the middle of being read."""

    keeps_tensors = True

    def __init__(self, folder: Path, action: Callable[[], Any]) -> None:
        self._source = CheckpointSource(folder)
        self._action = action

    def manifest(self) -> Mapping[str, TensorMeta]:
        return self._source.manifest()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number, item in enumerate(self._source.tensors()):
            if number == len(self._source.manifest()) // 2:
                self._action()
                time.sleep(0.2)
            yield item


def test_a_trainers_exception_in_the_middle_publishes_no_version_and_the_next_update_mends(
    pair: tuple[EngineProcess, EngineProcess], fresh: tuple[Any, Any], checkpoint: Callable[..., Path]
) -> None:
    b, c = checkpoint(MODEL, 2), checkpoint(MODEL, 3)

    def explode() -> None:
        raise ZeroDivisionError("loss is nan")

    with sender_for(*pair, config=b, batch_bytes=1) as sender:
        sender.update(CheckpointSource(c), "c")
        with pytest.raises(ZeroDivisionError, match="loss is nan"):
            sender.update(Midway(b, explode), "exploded")
        assert all(engine.version() == "c" for engine in pair)
        assert all(engine.is_paused() for engine in pair), "partly written engines must not serve"
    # Another process, which knows nothing of it, recovers them.
    with sender_for(*pair, config=b) as sender:
        assert sender.update(CheckpointSource(b), "b").ready == 2
    for engine, expected in zip(pair, fresh, strict=True):
        assert differences(held_by(engine), expected) == []


def test_an_exception_before_the_first_byte_resumes_the_old_version(
    pair: tuple[EngineProcess, EngineProcess], checkpoint: Callable[..., Path]
) -> None:
    class Broken(MemorySource):
        def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
            raise RuntimeError("gather failed")

    versions = [engine.version() for engine in pair]
    with sender_for(*pair, config=checkpoint(MODEL, 1)) as sender, pytest.raises(RuntimeError, match="gather failed"):
        sender.update(Broken(tensors_of(checkpoint(MODEL, 2))), "never")
    assert all(serves(engine, version) for engine, version in zip(pair, versions, strict=True))


def test_two_senders_at_once_do_not_mix(
    pair: tuple[EngineProcess, EngineProcess], engines: Engines, checkpoint: Callable[..., Path]
) -> None:
    folders = {seed: checkpoint(MODEL, seed) for seed in (2, 3)}
    two, _ = pair
    failures: list[BaseException] = []

    def push(seed: int) -> None:
        try:
            with sender_for(two, config=folders[seed], verify=Verify.DIGEST) as sender:
                for _ in range(3):
                    sender.update(CheckpointSource(folders[seed]), f"v{seed}")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=push, args=(seed,)) for seed in folders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert failures == []
    last = int(two.version().removeprefix("v"))
    with engines.running((folders[last], "--tp", "2")) as (started,):
        assert differences(held_by(two), held_by(started)) == []


def test_an_engine_that_restarted_is_connected_anew(engines: Engines, fresh: tuple[Any, Any], checkpoint: Callable[..., Path]) -> None:
    a, b = checkpoint(MODEL, 1), checkpoint(MODEL, 2)
    first = engines.run(a)
    port = int(first.url.rsplit(":", 1)[1])
    with sender_for(first, config=b) as sender:
        sender.update(CheckpointSource(b), "b")
        engines.stop(first)
        with pytest.raises(UpdateFailed, match="/server_info failed"):
            sender.update(CheckpointSource(b), "b")
        second = engines.run(a, port=port)
        assert sender.update(CheckpointSource(b), "b again").ready == 1
        assert differences(held_by(second), fresh[1]) == []
    engines.stop(second)


SCRIPT = """
import sys, os
from weightsync_sender import CheckpointSource, SenderSettings, WeightSender
class Slow(CheckpointSource):
    def tensors(self):
        for number, item in enumerate(super().tensors()):
            if number == {stop_at}:
                print("midway", flush=True)
                import time; time.sleep(60)
            yield item
sender = WeightSender(engines=sys.argv[2:], config=sys.argv[1], settings=SenderSettings(batch_bytes=1))
sender.update(CheckpointSource(sys.argv[1]), "first")
sender.update(Slow(sys.argv[1]), "second", progress=lambda event, fields: print(event, flush=True))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize(("phase", "stop_at", "paused"), [("connected", 5, False), ("opened", 0, False), ("midway", 12, True)])
def test_signals_leave_no_engine_paused_that_could_be_resumed(
    number: int, phase: str, stop_at: int, paused: bool, pair: tuple[EngineProcess, EngineProcess], checkpoint: Callable[..., Path]
) -> None:
    b = checkpoint(MODEL, 2)
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(stop_at=stop_at), str(b), *(engine.url for engine in pair)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.strip() == phase:
                break
        process.send_signal(number)
        assert process.wait(60) != 0
    finally:
        process.kill()
    for engine in pair:
        assert engine.is_paused() is paused
        assert engine.version() == "first"
    with sender_for(*pair, config=b) as sender:
        assert sender.update(CheckpointSource(b), "after").ready == 2
    assert all(serves(engine, "after") for engine in pair)


def test_a_second_interrupt_does_not_resume_what_is_half_written(
    pair: tuple[EngineProcess, EngineProcess], checkpoint: Callable[..., Path]
) -> None:
    b = checkpoint(MODEL, 2)
    _, one = pair
    process = subprocess.Popen([sys.executable, "-c", SCRIPT.format(stop_at=12), str(b), one.url], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.strip() == "midway":
                break
        for _ in range(10):
            process.send_signal(signal.SIGINT)
            time.sleep(0.02)
        assert process.wait(60) != 0
    finally:
        process.kill()
    assert one.is_paused()
    with sender_for(one, config=b) as sender:
        assert sender.update(CheckpointSource(b), "after").ready == 1


def test_a_fenced_engine_stays_fenced_when_the_next_update_fails_before_it_begins(
    pair: tuple[EngineProcess, EngineProcess], checkpoint: Callable[..., Path]
) -> None:
    b = checkpoint(MODEL, 2)
    _, one = pair

    def explode() -> None:
        raise ZeroDivisionError

    def update(source: Any, version: str, **settings: Any) -> UpdateReport:
        with sender_for(one, config=b, batch_bytes=1, **settings) as sender:
            return sender.update(source, version)

    update(CheckpointSource(b), "before")
    with pytest.raises(ZeroDivisionError):
        update(Midway(b, explode), "exploded")
    with pytest.raises(UpdateFailed, match="fenced"):
        update(CheckpointSource(b), "too late", timeouts=Timeouts(pause=1e-6))
    assert one.is_paused()
    assert update(CheckpointSource(b), "after").ready == 1
    assert serves(one, "after")


def test_a_session_that_somebody_else_ended_is_not_published(
    pair: tuple[EngineProcess, EngineProcess], checkpoint: Callable[..., Path]
) -> None:
    b = checkpoint(MODEL, 2)
    _, one = pair
    with sender_for(one, config=b) as sender:
        sender.update(CheckpointSource(b), "before")
        with pytest.raises(UpdateFailed, match="changed while it was written"):
            sender.update(Midway(b, lambda: one.post("/end_weight_update")), "meddled")
        assert one.version() == "before"
        assert sender.update(CheckpointSource(b), "after").ready == 1


def test_a_hundred_updates_keep_registrations_and_memory(
    pair: tuple[EngineProcess, EngineProcess], checkpoint: Callable[..., Path]
) -> None:
    tensors = tensors_of(checkpoint(MODEL, 2))
    _, one = pair
    with sender_for(one, config=checkpoint(MODEL, 1), transport="nixl") as sender:
        registrations = [sender.update(tensors, str(number)).registrations for number in range(100)]
    assert len(set(registrations[10:])) == 1
    assert max(registrations) <= len(tensors) + 16


@pytest.mark.parametrize("transport", ["mooncake", "nixl"])
def test_a_sender_that_slept_through_its_lease_spoils_nothing(
    transport: str, pair: tuple[EngineProcess, EngineProcess], fresh: tuple[Any, Any], checkpoint: Callable[..., Path]
) -> None:
    """Stopped in the middle of an update, overtaken by another sender, continued.

    Mooncake's writes are cut off, so the other's bytes stay. NIXL's over shared memory cannot be, so the engine is fenced.
    """
    _, one = pair
    script = SCRIPT.format(stop_at=12).replace("time.sleep(60)", "time.sleep(3)")
    script = script.replace("batch_bytes=1", f"batch_bytes=1, transport={transport!r}")
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(checkpoint(MODEL, 3)), one.url], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    b = checkpoint(MODEL, 2)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.strip() == "midway":
                break
        process.send_signal(signal.SIGSTOP)
        with sender_for(one, config=b, transport=transport, verify=Verify.DIGEST) as sender:
            assert sender.update(CheckpointSource(b), "overtaken").ready == 1
            process.send_signal(signal.SIGCONT)
            _, said = process.communicate(timeout=90)
            assert process.returncode != 0
            assert "did not renew its lease in time" in said
            if transport == "nixl":
                assert one.is_paused()
                assert sender.update(CheckpointSource(b), "overtaken").ready == 1
    finally:
        process.kill()
    assert serves(one, "overtaken")
    assert differences(held_by(one), fresh[1]) == []


def test_a_call_of_a_sender_without_the_lease_is_refused(pair: tuple[EngineProcess, EngineProcess]) -> None:
    """What a stalled sender sends late (resume, another version) must not reach the engine of its successor."""
    _, one = pair
    lease = {"owner": "successor", "seconds": 30, "renew": False}
    assert httpx.post(one.url + LEASE_ROUTE, json=lease).status_code == 200
    try:
        late = httpx.post(f"{one.url}/pause_generation", json={"mode": "abort"}, headers={OWNER_HEADER: "stalled"})
        assert late.status_code == 409
        assert "successor" in late.text
        assert not one.is_paused()
        own = httpx.post(f"{one.url}/continue_generation", json={}, headers={OWNER_HEADER: "successor"})
        assert own.status_code == 200
    finally:
        httpx.delete(f"{one.url}{LEASE_ROUTE}?owner=successor")
