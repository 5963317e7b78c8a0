"""Trainer ranks on this machine: processes of one torch process group, each with a sender, that update together.

``run_ranks`` starts them, gives each a function, and returns what it returned or how it failed. Functions are given by
``module:name``, since every rank is a fresh interpreter.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weightsync_devkit.engines import cpu_environment, free_port


@dataclass
class Rank:
    """One trainer rank's process."""

    rank: int
    process: subprocess.Popen[bytes]
    answer: Path
    log: Path

    def result(self, seconds: float) -> dict[str, Any]:
        """What its function returned, or ``{"raised": type, "message": text}``; ``{"exit": code}`` if it ended without a word."""
        self.process.wait(seconds)
        if self.answer.exists():
            found: dict[str, Any] = json.loads(self.answer.read_text())
            return found
        return {"exit": self.process.returncode, "log": self.log.read_text(errors="replace")[-3000:]}


def start_ranks(size: int, function: str, folder: Path, options: Mapping[str, Any], **environment: str) -> list[Rank]:
    """Start ``size`` ranks; each calls ``function(**options)`` with its process group made.

    Args:
        function: ``module:name`` or ``FILE:name``; returns what JSON can hold.
        folder: for logs and answers.
    """
    folder.mkdir(parents=True, exist_ok=True)
    port, ranks = free_port(), []
    for rank in range(size):
        answer, log = folder / f"rank-{rank}.json", folder / f"rank-{rank}.log"
        answer.unlink(missing_ok=True)
        env = {
            **os.environ, **cpu_environment(), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank),
            "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), **environment,
        }  # fmt: skip
        command = [sys.executable, "-m", "weightsync_devkit.trainers", function, str(answer), json.dumps(dict(options))]
        with log.open("wb") as out:
            process = subprocess.Popen(command, env=env, stdout=out, stderr=out, stdin=subprocess.DEVNULL)
        ranks.append(Rank(rank, process, answer, log))
    return ranks


def run_ranks(size: int, function: str, folder: Path, options: Mapping[str, Any], *, seconds: float = 240.0) -> list[dict[str, Any]]:
    """Start ranks and wait; ended ones are not left behind."""
    ranks = start_ranks(size, function, folder, options)
    try:
        return [rank.result(seconds) for rank in ranks]
    finally:
        for rank in ranks:
            rank.process.kill()
            rank.process.wait()


def _load(function: str) -> Callable[..., Any]:
    place, name = function.rsplit(":", 1)
    if place.endswith(".py"):
        sys.path.insert(0, str(Path(place).parent))
        place = Path(place).stem
    found: Callable[..., Any] = getattr(importlib.import_module(place), name)
    return found


def _main() -> None:
    import torch
    import torch.distributed as dist

    function, answer, options = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        found = _load(function)(**options)
    except Exception as error:  # whatever it is, the one who started this rank is told
        found = {"raised": type(error).__name__, "message": str(error)}
        import traceback

        traceback.print_exc()
    part = answer.with_suffix(".part")
    part.write_text(json.dumps(found))
    part.rename(answer)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    _main()
