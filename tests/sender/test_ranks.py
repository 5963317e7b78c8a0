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


@pytest.mark.timeout(900)
def test_a_rank_that_dies_in_any_phase_is_everybodys_error_and_the_next_update_mends_it(
    engines: Engines, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    a, b = checkpoint("qwen3", 1), checkpoint("qwen3", 2)
    with engines.running((a, "--tp", "2")) as (engine,), engines.running((b, "--tp", "2")) as (fresh,):
        for at, dies in (("beginning", 1), ("compiling", 1), ("opening", 0), ("writing", 1), ("writing", 0), ("ending", 0)):
            options = {"urls": [engine.url], "folder": str(b), "version": at, "transport": "mooncake", "at": at, "rank": dies}
            results = run_ranks(2, f"{RANKS}:push_and_die", tmp_path / f"{at}-{dies}", options)
            assert results[dies]["exit"] == -9, results
            other = results[1 - dies]
            assert other.get("raised") == "PartyError", (at, results)
            assert f"rank {dies}" in other["message"]
            if dies == 1 and at != "writing":
                assert not engine.is_paused(), f"nothing was written when rank 1 died {at}"
            assert engine.version() == "default"
        options = {"urls": [engine.url], "checkpoints": {"b": str(b)}, "transport": "mooncake", "mesh": [2]}
        assert [report.get("ready") for report in run_ranks(2, f"{RANKS}:push_sharded", tmp_path, options)] == [1, 1]
        assert differences(held_by(engine), held_by(fresh)) == []


def test_stages_that_hold_different_tensors_each_write_their_own(engines: Engines, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Three ranks: two of the first stage, one of the second; every target is written once by each stage."""
    a, b = checkpoint("qwen3_moe", 1), checkpoint("qwen3_moe", 2)
    with engines.running((a, "--tp", "2", "--ep", "2")) as (engine,), engines.running((b, "--tp", "2", "--ep", "2")) as (fresh,):
        options = {"urls": [engine.url], "folder": str(b), "transport": "nixl", "stages": 2}
        reports = run_ranks(3, f"{RANKS}:push_stages", tmp_path, options)
        assert [report.get("ready") for report in reports] == [1, 1, 1], reports
        by_group = {(group, rank): writer for group, _, _, rank, writer in reports[0]["writers"]}
        assert {by_group["stage-0", 0], by_group["stage-0", 1]} == {0, 1}
        assert {by_group["stage-1", 0], by_group["stage-1", 1]} == {2}
        (written,) = reports[0]["engines"].values()
        assert written["written_bytes"] == written["planned_bytes"]
        assert engine.checksums() == fresh.checksums()
