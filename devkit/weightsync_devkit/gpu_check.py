"""Real engines on GPUs: a new checkpoint by every way there is, compared with what an engine started from it holds.

``python -m weightsync_devkit.gpu_check [--out FOLDER] [--families NAME,...] [--two-ranks NAME,...]`` starts, for each family,
a stock engine (sglang's own Mooncake seeding, no plugin) of checkpoint A and one with the plugin (both transports) of
checkpoint B, writes down what each holds and generates, then pushes B into the first and A into the second and compares.
``--two-ranks`` does it with tensor parallel 2 on two GPUs. One JSON line for each way; exit code 1 if any differs. The sender runs
in this process, on the same machine.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weightsync_devkit import zoo
from weightsync_devkit.engines import GPU_ARGUMENTS, GPU_ENVIRONMENT, EngineProcess, Engines
from weightsync_devkit.oracle import Held, differences, held_by
from weightsync_sender import CheckpointSource, SenderSettings, Verify, WeightSender

FAMILIES = "qwen3,qwen3_moe,glm4_moe,deepseek_v3,qwen3_fp8,qwen3_moe_fp8"
SEEDING = "--remote-instance-weight-loader-start-seed-via-transfer-engine"


class Report:
    """JSON lines, on the screen and in a file."""

    def __init__(self, out: Path) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self._file = (out / "gpu_check.jsonl").open("w")
        self.failed = 0

    def say(self, **fields: Any) -> None:
        """One line; counts those that are not ok."""
        self.failed += not fields.get("ok", True)
        line = json.dumps(fields)
        print(line, flush=True)
        self._file.write(line + "\n")
        self._file.flush()


@dataclass(frozen=True)
class Pair:
    """A stock engine of A and a plugin engine of B, with the checkpoints."""

    name: str
    stock: EngineProcess
    plugin: EngineProcess
    a: Path
    b: Path


def check(
    report: Report, pair: Pair, way: str, engine: EngineProcess, there: Path, back: Path, expected: Held, settings: SenderSettings
) -> None:
    """Push ``there``, compare with an engine started from it, push ``back``, and both once more."""
    fields: dict[str, Any] = {"family": pair.name, "way": way}
    try:
        with WeightSender(engines=[engine.url], config=there, settings=settings) as sender:
            changed = len(differences(held_by(engine), expected))
            updates = [sender.update(CheckpointSource(there), "there")]
            wrong = differences(held_by(engine), expected)
            updates += [sender.update(CheckpointSource(back), "back"), sender.update(CheckpointSource(there), "there again")]
            wrong += differences(held_by(engine), expected)
            updates.append(sender.update(CheckpointSource(back), "back again"))
        one = next(iter(updates[2].engines.values()))
        fields.update(
            ok=not wrong and changed > 0, differing_before=changed, wrong=wrong[:5], bytes=one.written_bytes,
            seconds={phase: round(spent, 3) for phase, spent in one.seconds.items()}, transport=one.transport,
            direct=updates[2].direct_bytes, packed=updates[2].packed_bytes, notes=len(one.notes),
        )  # fmt: skip
    except Exception as error:  # every way is reported, whatever became of it
        fields.update(ok=False, error=f"{type(error).__name__}: {error}"[:1500])
    report.say(**fields)


def run(report: Report, folder: Path, families: Sequence[str], two_ranks: Sequence[str]) -> None:
    """Start all engines side by side, then check one pair after the other."""
    started = time.monotonic()
    with Engines(folder / "run", zygote=False, arguments=GPU_ARGUMENTS, environment=GPU_ENVIRONMENT) as engines:
        pairs = [_start(engines, folder, name) for name in families]
        for name in two_ranks:
            ranks = ("--tp", "2", "--ep", "2") if zoo.ZOO[name].moe and not zoo.ZOO[name].fp8 else ("--tp", "2")
            pairs.append(_start(engines, folder, name, *ranks))
        for pair in pairs:
            try:
                engines.wait(pair.stock, pair.plugin)
            except RuntimeError as error:
                report.say(family=pair.name, ok=False, error=str(error)[-2500:])
                continue
            report.say(family=pair.name, started=round(time.monotonic() - started, 1))
            of_a, of_b = held_by(pair.stock), held_by(pair.plugin)
            digest = Verify.DIGEST
            check(report, pair, "stock mooncake", pair.stock, pair.b, pair.a, of_b, SenderSettings(transport="mooncake", verify=digest))
            for transport in ("mooncake", "nixl"):
                check(
                    report,
                    pair,
                    f"plugin {transport}",
                    pair.plugin,
                    pair.a,
                    pair.b,
                    of_a,
                    SenderSettings(transport=transport, verify=digest),
                )
            snapshot = SenderSettings(transport="nixl", verify=Verify.SNAPSHOT)
            check(report, pair, "plugin nixl snapshot", pair.plugin, pair.a, pair.b, of_a, snapshot)
    report.say(seconds=round(time.monotonic() - started, 1), failed=report.failed)


def _start(engines: Engines, folder: Path, name: str, *ranks: str) -> Pair:
    a, b = (zoo.write(name, folder / f"seed-{seed}" / name, seed, sizes=zoo.GPU) for seed in (1, 2))
    stock = engines.start(a, SEEDING, *ranks, transports="none")
    return Pair(" ".join((name, *ranks)), stock, engines.start(b, *ranks), a, b)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu-check"))
    parser.add_argument("--families", default=FAMILIES)
    parser.add_argument("--two-ranks", default="")
    options = parser.parse_args()
    os.environ.update(GPU_ENVIRONMENT)
    report = Report(options.out)
    with tempfile.TemporaryDirectory() as folder:
        run(report, Path(folder), *([name for name in text.split(",") if name] for text in (options.families, options.two_ranks)))
    sys.stdout.flush()
    sys.exit(1 if report.failed else 0)


if __name__ == "__main__":
    main()
