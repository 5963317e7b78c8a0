"""The command as users run it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from weightsync_devkit.engines import EngineProcess, Engines, cpu_environment, free_port
from weightsync_devkit.oracle import differences, held_by

pytestmark = pytest.mark.engines


def weightsync(*arguments: object, check: int | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "weightsync_sender.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **cpu_environment(), "COLUMNS": "200", **environment},
    )
    assert check is None or done.returncode == check, (done.returncode, done.stdout, done.stderr)
    return done


@pytest.fixture(scope="module")
def engine(engines: Engines, checkpoint: Callable[..., Path]) -> Iterator[EngineProcess]:
    with engines.running((checkpoint("qwen3", 1), "--tp", "2")) as (started,):
        yield started


def test_push_plan_and_doctor(engine: EngineProcess, engines: Engines, checkpoint: Callable[..., Path]) -> None:
    b = checkpoint("qwen3", 2, 3)
    shown = weightsync("push", b, engine.url, "--version", "v2", "--verify", "digest", check=0)
    assert "version v2: 1 of 1 engines" in shown.stdout
    assert "ready" in shown.stdout
    with engines.running((b, "--tp", "2")) as (fresh,):
        assert differences(held_by(engine), held_by(fresh)) == []
    assert engine.version() == "v2"

    report = json.loads(weightsync("push", b, engine.url, "--transport", "nixl", "--json", check=0).stdout)
    assert report["ready"] == 1
    assert report["version"] == "qwen3"
    assert report["engines"][engine.url]["written_bytes"] == report["engines"][engine.url]["planned_bytes"] > 0

    plan = json.loads(weightsync("plan", engine.url, "--checkpoint", b, "--trainers", "2", "--json", check=0).stdout)
    assert {target["writer"] for target in plan["targets"]} == {0, 1}
    assert all(target["direct"] + target["packed"] == target["bytes"] for target in plan["targets"])
    assert "load of trainer ranks" in weightsync("plan", engine.url, check=0).stdout

    findings = json.loads(weightsync("doctor", engine.url, "--json", check=0).stdout)
    assert any(finding["seen"] == "plugin installed" for finding in findings)


def test_exit_codes_and_messages(engine: EngineProcess, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    a = checkpoint("qwen3", 1)
    nowhere = f"http://127.0.0.1:{free_port()}"
    done = weightsync("push", a, nowhere, check=1)
    assert "server_info failed" in done.stderr
    done = weightsync("push", a, engine.url, nowhere, check=1)
    assert "1 of 2 engines serve version" in done.stderr
    weightsync("push", a, engine.url, nowhere, "--minimum-engines", "1", check=0)
    assert "is no folder" in weightsync("push", tmp_path / "none", engine.url, check=2).stderr
    assert "expected e.g. http://10.0.0.7:30000" in weightsync("push", a, "ftp://x", check=2).stderr
    assert "given twice" in weightsync("push", a, engine.url, engine.url, check=2).stderr
    assert "set at least" in weightsync("push", a, engine.url, "--buffer-size", "1KB", check=2).stderr
    assert "is no size" in weightsync("push", a, engine.url, "--buffer-size", "lots", check=2).stderr
    assert "NO_SUCH_KEY is not set" in weightsync("push", a, engine.url, "--api-key-env", "NO_SUCH_KEY", check=2).stderr
    assert "minimum_engines is 9" in weightsync("push", a, engine.url, "--minimum-engines", "9", check=2).stderr
    assert "no regular expression" in weightsync("push", a, engine.url, "--allow-unused", "(", check=2).stderr
    done = weightsync("doctor", nowhere, check=1)
    assert "start it, or check address" in done.stdout
    assert "Traceback" not in done.stderr
    assert not engine.is_paused()


def test_an_interrupt_ends_with_its_code_and_a_serving_engine(engine: EngineProcess, checkpoint: Callable[..., Path]) -> None:
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        process = subprocess.Popen(
            [sys.executable, "-m", "weightsync_sender.cli", "push", str(checkpoint("qwen3", 1)), engine.url],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env={**os.environ, **cpu_environment()},
        )  # fmt: skip
        assert process.stdout is not None
        assert any("connected" in line for line in process.stdout)
        process.send_signal(number)
        assert process.wait(60) == code
        weightsync("push", checkpoint("qwen3", 2), engine.url, "--version", f"after {number}", check=0)
        assert engine.version() == f"after {number}"
        assert not engine.is_paused()


def test_an_engine_that_does_not_answer_delays_neither_a_word_about_the_others_nor_the_end(checkpoint: Callable[..., Path]) -> None:
    nowhere = f"http://127.0.0.1:{free_port()}"
    with socket.create_server(("127.0.0.1", 0)) as hung:
        url = f"http://127.0.0.1:{hung.getsockname()[1]}"
        process = subprocess.Popen(
            [sys.executable, "-m", "weightsync_sender.cli", "push", str(checkpoint("qwen3", 1)), url, nowhere],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env={**os.environ, **cpu_environment()},
        )  # fmt: skip
        assert process.stdout is not None
        assert "connecting engines=2" in process.stdout.readline()
        assert f"failed engine={nowhere}" in process.stdout.readline()
        process.terminate()
        assert process.wait(15) == 143


def test_a_closed_output_does_not_stop_an_update(engine: EngineProcess, checkpoint: Callable[..., Path]) -> None:
    """``weightsync push ... | head -1``"""
    process = subprocess.Popen(
        [sys.executable, "-m", "weightsync_sender.cli", "push", str(checkpoint("qwen3", 1)), engine.url, "--version", "piped"],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env={**os.environ, **cpu_environment()},
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(60) == 0
    assert engine.version() == "piped"
    assert not engine.is_paused()
