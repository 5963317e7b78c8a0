"""Engines started as users start them: spawned interpreters, not forks of one that has everything imported."""

from collections.abc import Callable
from pathlib import Path

import pytest

from weightsync_devkit.engines import Engines
from weightsync_devkit.oracle import differences, held_by
from weightsync_sender import CheckpointSource, SenderSettings, Verify, WeightSender

pytestmark = pytest.mark.engines


def test_spawned_engines_are_written_by_both_transports(engines: Engines, checkpoint: Callable[..., Path]) -> None:
    a, b = checkpoint("qwen3_moe", 1), checkpoint("qwen3_moe", 2)
    with engines.running((a, "--tp", "2"), spawn=True) as (engine,), engines.running((b, "--tp", "2")) as (fresh,):
        of_a, of_b = held_by(engine), held_by(fresh)
        for transport in ("mooncake", "nixl"):
            settings = SenderSettings(transport=transport, verify=Verify.DIGEST)
            with WeightSender(engines=[engine.url], config=b, settings=settings) as sender:
                sender.update(CheckpointSource(b), "b")
                assert differences(held_by(engine), of_b) == []
                sender.update(CheckpointSource(a), "a")
                assert differences(held_by(engine), of_a) == []
