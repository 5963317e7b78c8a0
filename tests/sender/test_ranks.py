"""Several trainer ranks bring one update together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from weightsync_devkit.engines import Engines
from weightsync_devkit.oracle import differences, held_by
from weightsync_devkit.trainers import run_ranks

pytestmark = pytest.mark.engines

RANKS = f"{Path(__file__).parent / 'trainer_ranks.py'}"


@pytest.mark.parametrize(
    ("family", "transport", "ranks", "mesh"),
    [("qwen3", "mooncake", 2, [2]), ("qwen3_moe", "nixl", 4, [2, 2])],
)
def test_sharded_tensors_reach_engines_of_several_sizes(
    family: str, transport: str, ranks: int, mesh: list[int], engines: Engines, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    a, b, c = (checkpoint(family, seed) for seed in (1, 2, 3))
    with engines.running((a, "--tp", "2"), (a,)) as started, engines.running((c, "--tp", "2"), (c,)) as fresh:
        options = {"urls": [e.url for e in started], "checkpoints": {"b": str(b), "c": str(c)}, "transport": transport, "mesh": mesh}
        reports = run_ranks(ranks, f"{RANKS}:push_sharded", tmp_path, options)
        assert [report.get("ready") for report in reports] == [2] * ranks, reports
        assert all(report == reports[0] for report in reports)
        loads = Counter(writer for *_, writer in reports[0]["writers"])
        assert len(reports[0]["writers"]) == 3
        assert max(loads.values()) <= 2
        for engine, other in zip(started, fresh, strict=True):
            assert engine.version() == "c"
            assert differences(held_by(engine), held_by(other)) == []
