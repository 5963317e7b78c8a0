"""Stock sglang engines on this machine's CPU, as real processes on ports of their own.

``Engines`` starts them (forked from a zygote, or spawned as users do), waits until they serve, and ends every one that it
started by the process group that it recorded.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

START_SECONDS = 240.0

CPU_ARGUMENTS = (
    "--skip-tokenizer-init", "--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch",
    "--mem-fraction-static", "0.5", "--max-total-tokens", "512", "--disable-overlap-schedule", "--skip-server-warmup", "--sleep-on-idle",
    "--random-seed", "1", "--host", "127.0.0.1",
)  # fmt: skip


def cpu_environment() -> dict[str, str]:
    """What a CPU engine's environment needs."""
    return {
        "HF_HUB_OFFLINE": "1",
        "MOONCAKE_PROTOCOL": "tcp",
        "MC_LOG_LEVEL": "ERROR",
        "SGLANG_HOST_IP": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(cpu % (os.cpu_count() or 1)) for cpu in range(8)),
    }


GPU_ARGUMENTS = (
    "--skip-tokenizer-init", "--attention-backend", "triton", "--sampling-backend", "pytorch", "--disable-radix-cache",
    "--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled", "--mem-fraction-static", "0.6",
    "--max-total-tokens", "2048", "--disable-overlap-schedule", "--skip-server-warmup", "--random-seed", "1", "--watchdog-timeout", "600",
    "--host", "127.0.0.1",
)  # fmt: skip
GPU_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "MOONCAKE_PROTOCOL": "tcp", "MC_LOG_LEVEL": "ERROR", "SGLANG_HOST_IP": "127.0.0.1"}


def free_port() -> int:
    """A port that is free now, and that no outgoing connection takes before it is used (below Linux's range for those)."""
    while True:
        port = random.randrange(20000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("0.0.0.0", port))
            return port


@dataclass
class EngineProcess:
    """One running engine."""

    url: str
    pid: int
    """Of the leader of its process group."""
    log: Path
    model: Path

    def generate(self, prompt: Sequence[int], tokens: int = 8) -> list[int]:
        """Greedy tokens."""
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        answer = httpx.post(f"{self.url}/generate", json={"input_ids": list(prompt), "sampling_params": sampling}, timeout=120)
        answer.raise_for_status()
        return list(answer.json()["output_ids"])

    def checksums(self) -> list[dict[str, str]]:
        """sglang's checksums of all tensors, one mapping per rank."""
        answer = httpx.post(f"{self.url}/weights_checker", json={"action": "checksum"}, timeout=120)
        answer.raise_for_status()
        return [rank["checksums"] for rank in answer.json()["ranks"]]

    def version(self) -> str:
        """The weight version that it reports."""
        return str(httpx.get(f"{self.url}/model_info", timeout=20).json()["weight_version"])

    def post(self, path: str, **body: Any) -> httpx.Response:
        """Any control call."""
        return httpx.post(f"{self.url}{path}", json=body, timeout=120)

    def is_paused(self) -> bool:
        """Whether a request waits instead of being answered."""
        try:
            httpx.post(f"{self.url}/generate", json={"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 1}}, timeout=6).json()
        except httpx.TimeoutException:
            return True
        return False

    def tail(self, lines: int = 30) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def table(self) -> list[dict[str, Any]]:
        """The plugin's live tables, one per rank and role."""
        answer = httpx.post(f"{self.url}/weights_checker", json={"action": "p2p_weightsync.table"}, timeout=60).json()
        return [json.loads(text) for rank in answer["ranks"] for text in rank["checksums"].values()]

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Signal the whole engine."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)


class Engines:
    """Starts and ends engines; use as a context manager."""

    def __init__(
        self, folder: Path, *, zygote: bool = True, arguments: Sequence[str] = CPU_ARGUMENTS, environment: Mapping[str, str] | None = None
    ) -> None:
        self._folder = folder
        self._arguments = tuple(arguments)
        self._environment = dict(environment if environment is not None else cpu_environment())
        self._zygote_socket = folder / "zygote.sock"
        self._zygote: subprocess.Popen[bytes] | None = None
        self._wanted_zygote = zygote
        self._started: list[EngineProcess] = []
        self._number = 0

    def __enter__(self) -> Engines:
        self._folder.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *exc: object) -> None:
        for engine in list(self._started):
            self.stop(engine)
        if self._zygote is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._zygote.pid, signal.SIGKILL)
            self._zygote.wait(20)

    def start(
        self, model: Path, *arguments: str, transports: str = "mooncake,nixl", spawn: bool = False, port: int | None = None, **more: str
    ) -> EngineProcess:
        """Start one engine without waiting for it.

        Args:
            model: checkpoint folder.
            arguments: more of sglang's arguments, e.g. ``"--tp", "2"``.
            transports: WEIGHTSYNC_TRANSPORTS.
            spawn: start it as users do, not from the zygote.
            port: of its HTTP server; default one that is free.
            more: more environment variables.
        """
        port = port or free_port()
        self._number += 1
        log = self._folder / f"engine-{self._number}-{model.parent.name}-{model.name}.log"
        argv = [
            "--model-path", str(model), *self._arguments, "--port", str(port), "--engine-info-bootstrap-port", str(free_port()), *arguments,
        ]  # fmt: skip
        env = {**self._environment, "WEIGHTSYNC_TRANSPORTS": transports, **more}
        if spawn or not self._wanted_zygote:
            with log.open("wb") as out:
                process = subprocess.Popen(
                    [sys.executable, "-m", "sglang.launch_server", *argv], env={**os.environ, **env}, stdout=out, stderr=out,
                    stdin=subprocess.DEVNULL, start_new_session=True,
                )  # fmt: skip
            pid = process.pid
        else:
            pid = self._fork(argv, env, log)
        engine = EngineProcess(f"http://127.0.0.1:{port}", pid, log, model)
        self._started.append(engine)
        return engine

    def wait(self, *engines: EngineProcess) -> None:
        """Wait until engines serve.

        Raises:
            RuntimeError: one ended or took too long; with the end of its log.
        """
        until = time.monotonic() + START_SECONDS
        for engine in engines:
            while not self._serves(engine):
                if not _alive(engine.pid) or time.monotonic() > until:
                    raise RuntimeError(f"engine {engine.model} did not start:\n{engine.tail()}")
                time.sleep(0.1)

    def run(self, model: Path, *arguments: str, **options: Any) -> EngineProcess:
        """Start one engine and wait for it."""
        engine = self.start(model, *arguments, **options)
        self.wait(engine)
        return engine

    def stop(self, engine: EngineProcess) -> None:
        """End an engine and all its processes."""
        engine.kill()
        if engine in self._started:
            self._started.remove(engine)
        until = time.monotonic() + 20
        while _alive(engine.pid) and time.monotonic() < until:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(engine.pid, os.WNOHANG)
            time.sleep(0.02)

    @contextlib.contextmanager
    def running(self, *starts: tuple[Any, ...], **options: Any) -> Iterator[list[EngineProcess]]:
        """Several engines side by side, ended afterwards; each start is (model, *arguments)."""
        engines = [self.start(*start, **options) for start in starts]
        try:
            self.wait(*engines)
            yield engines
        finally:
            for engine in engines:
                self.stop(engine)

    @staticmethod
    def _serves(engine: EngineProcess) -> bool:
        try:
            answer = httpx.get(f"{engine.url}/model_info", timeout=2)
            # Another process may have taken the port in between; then the engine ends by itself.
            return bool(answer.status_code == 200 and answer.json()["model_path"] == str(engine.model))
        except httpx.HTTPError:
            return False

    def _fork(self, argv: Sequence[str], env: dict[str, str], log: Path) -> int:
        if self._zygote is None:
            with (self._folder / "zygote.log").open("wb") as out:
                self._zygote = subprocess.Popen(
                    [sys.executable, "-m", "weightsync_devkit.zygote", str(self._zygote_socket)],
                    env={**os.environ, **self._environment}, stdout=out, stderr=out, stdin=subprocess.DEVNULL, start_new_session=True,
                )  # fmt: skip
        until = time.monotonic() + START_SECONDS
        while True:
            try:
                with socket.socket(socket.AF_UNIX) as asking:
                    asking.connect(str(self._zygote_socket))
                    asking.sendall((json.dumps({"arguments": list(argv), "environment": env, "log": str(log)}) + "\n").encode())
                    return int(json.loads(asking.makefile().readline())["pid"])
            except (FileNotFoundError, ConnectionRefusedError):
                if self._zygote.poll() is not None or time.monotonic() > until:
                    log_text = (self._folder / "zygote.log").read_text(errors="replace")[-3000:]
                    raise RuntimeError(f"the zygote did not start:\n{log_text}") from None
                time.sleep(0.1)


def _alive(pid: int) -> bool:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
