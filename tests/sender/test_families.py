"""Every family, every layout, both transports: an updated engine equals one that was started from the checkpoint."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch

from weightsync_devkit import zoo
from weightsync_devkit.engines import Engines
from weightsync_devkit.oracle import differences, held_by
from weightsync_sender import CheckpointSource, SenderSettings, TensorMeta, Verify, WeightSender

pytestmark = pytest.mark.engines

LAYOUTS = {"tp 1": (), "tp 2": ("--tp", "2"), "tp 2 ep 2": ("--tp", "2", "--ep", "2"), "tp 4": ("--tp", "4")}
CASES = [
    pytest.param(name, layout, id=f"{name}, {layout}")
    for name, family in zoo.ZOO.items()
    for layout in LAYOUTS
    if (layout in ("tp 1", "tp 2")) or (layout == "tp 2 ep 2" and family.moe) or (layout == "tp 4" and name == "qwen3_8_heads")
]


class Shuffled:
    """A checkpoint whose tensors come in another order each time."""

    keeps_tensors = True

    def __init__(self, folder: Path, seed: int) -> None:
        self._source = CheckpointSource(folder)
        self._random = random.Random(seed)

    def manifest(self) -> Mapping[str, TensorMeta]:
        return self._source.manifest()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        tensors = list(self._source.tensors())
        self._random.shuffle(tensors)
        yield from tensors


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_three_updates_in_any_order_equal_engines_started_from_the_checkpoints(
    name: str, layout: str, engines: Engines, checkpoint: Callable[..., Path]
) -> None:
    family = zoo.ZOO[name]
    a, b, c = (checkpoint(name, seed) for seed in (1, 2, 3))
    arguments = (*LAYOUTS[layout], *family.arguments)
    with engines.running((a, *arguments), (b, *arguments)) as (first, second):
        of_a, of_b = (held_by(engine, generate=family.forward) for engine in (first, second))
        assert differences(of_a, of_b), "the checkpoints must differ for this to show anything"
        # Mooncake: A -> B, plain order. Then the same engine by NIXL, shuffled, over other weights and back.
        settings = SenderSettings(transport="mooncake", verify=Verify.DIGEST)
        with WeightSender(engines=[first.url], config=b, settings=settings) as sender:
            report = sender.update(CheckpointSource(b), "b")
        (engine,) = report.engines.values()
        assert engine.written_bytes == engine.planned_bytes == report.direct_bytes + report.packed_bytes > 0
        assert differences(held_by(first, generate=family.forward), of_b) == []
        settings = SenderSettings(transport="nixl", verify=Verify.DIGEST)
        with WeightSender(engines=[first.url], config=b, settings=settings) as sender:
            sender.update(Shuffled(c, 1), "c")
            sender.update(Shuffled(a, 2), "a")
        assert differences(held_by(first, generate=family.forward), of_a) == []
        assert first.version() == "a"
