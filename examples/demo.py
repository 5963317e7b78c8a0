"""The main job on this machine: two stock engines get a new checkpoint by Mooncake, then another by NIXL.

Run it with ``make demo``. It writes three tiny checkpoints, starts two sglang engines of the first (tensor parallel 2 and 1)
and one of each of the others to compare with, pushes, and prints what each engine says before and after, what travelled, and
that every tensor and every token equals those of an engine started from the new checkpoint.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.table import Table

from weightsync_devkit import zoo
from weightsync_devkit.engines import EngineProcess, Engines, cpu_environment
from weightsync_devkit.oracle import Held, differences, held_by
from weightsync_sender.cli._console import make_console

MODEL = "qwen3_moe"
PROMPT = (5, 6, 7, 8, 9)
console = make_console()


def main() -> int:
    """Returns 0 if everything equals the fresh engines."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="weightsync-demo-") as name:
        folder = Path(name)
        checkpoints = [
            zoo.write(MODEL, folder / label / MODEL, seed, shards=2) for seed, label in enumerate(("start", "first", "second"), 1)
        ]
        console.print(f"three checkpoints of a tiny {MODEL}; starting stock sglang engines on the CPU ...")
        with Engines(folder / "run") as engines:
            return show(engines, checkpoints, started)


def show(engines: Engines, checkpoints: list[Path], started: float) -> int:
    """Start, push, compare."""
    start, first, second = checkpoints
    served = [engines.start(start, "--tp", "2"), engines.start(start)]
    engines.wait(*served)
    console.print(
        f"two engines serve {start.parent.name} after {time.monotonic() - started:.0f} s: {served[0].url} (tp 2), {served[1].url} (tp 1)"
    )
    expected = {folder: fresh(engines, folder) for folder in (first, second)}
    wrong = 0
    for folder, transport in ((first, "mooncake"), (second, "nixl")):
        before = [engine.generate(PROMPT) for engine in served]
        push(folder, transport, served)
        table = Table(title=f"checkpoint '{folder.parent.name}' by {transport}")
        for column in ("engine", "tokens before", "tokens after", "equals an engine started from it"):
            table.add_column(column, overflow="fold")
        for engine, old, held in zip(served, before, expected[folder], strict=True):
            different = differences(held_by(engine), held)
            wrong += len(different)
            tensors = sum(len(rank) for rank in held.checksums)
            verdict = f"yes: {tensors} tensors and all tokens" if not different else f"NO: {', '.join(different[:5])}"
            table.add_row(engine.url, str(old), str(engine.generate(PROMPT)), verdict)
        console.print(table)
    console.print(f"{'all equal' if not wrong else 'DIFFERENT'}, {time.monotonic() - started:.0f} s in all")
    return 0 if not wrong else 1


def fresh(engines: Engines, folder: Path) -> list[Held]:
    """What engines hold that are started from a checkpoint: tp 2, tp 1."""
    with engines.running((folder, "--tp", "2"), (folder,)) as started:
        return [held_by(engine) for engine in started]


def push(folder: Path, transport: str, served: list[EngineProcess]) -> None:
    """The command as users type it."""
    command = ["push", str(folder), *(engine.url for engine in served), "--transport", transport, "--version", folder.parent.name]
    console.print(f"[bold]$ weightsync {' '.join(command)} --verify digest[/]")
    subprocess.run(
        [sys.executable, "-m", "weightsync_sender.cli", *command, "--verify", "digest"],
        check=True,
        env={**os.environ, **cpu_environment()},
    )


if __name__ == "__main__":
    sys.exit(main())
