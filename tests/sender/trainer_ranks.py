"""What trainer ranks do in tests; run in processes of their own (:mod:`weightsync_devkit.trainers`)."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from weightsync_sender import CheckpointSource, SenderSettings, UpdateFailed, Verify, WeightSender, WeightSyncError
from weightsync_sender.engine import Engine
from weightsync_sender.engine_update import EngineUpdate
from weightsync_sender.sources import MemorySource
from weightsync_sender.stream import Target
from weightsync_sender.update import Update


def sharded(folder: str, mesh_shape: Sequence[int]) -> dict[str, torch.Tensor]:
    """A checkpoint's tensors as DTensors, sharded by their first axis over the last axis of a mesh; sizes need not divide."""
    names = ("replicate", "shard")[-len(mesh_shape) :]
    mesh = init_device_mesh("cpu", tuple(mesh_shape), mesh_dim_names=names)
    placements = [Replicate()] * (len(mesh_shape) - 1) + [Shard(0)]
    return {name: distribute_tensor(tensor, mesh, placements) for name, tensor in CheckpointSource(folder).tensors()}


def sender_for(urls: Sequence[str], config: str, transport: str, **settings: Any) -> WeightSender:
    made = SenderSettings(transport=transport, verify=Verify.DIGEST, **settings)
    return WeightSender(engines=urls, config=config, settings=made, group=dist.group.WORLD, host="127.0.0.1")


def push_sharded(urls: Sequence[str], checkpoints: Mapping[str, str], transport: str, mesh: Sequence[int]) -> dict[str, Any]:
    """Bring each checkpoint in turn; returns the last report and what this rank wrote itself."""
    with sender_for(urls, next(iter(checkpoints.values())), transport) as sender:
        for version, folder in checkpoints.items():
            try:
                report = sender.update(sharded(folder, mesh), version)
            except UpdateFailed as error:
                report = error.report  # type: ignore[assignment]
        writers = [[group, *target, rank] for (group, target), rank in sender._writers.items()]
    return {**report.as_dict(), "writers": writers}


def push_and_die(urls: Sequence[str], folder: str, version: str, transport: str, at: str, rank: int) -> dict[str, Any]:
    """As above, but one rank dies on the way, in the phase that ``at`` names."""
    if dist.get_rank() == rank:
        owner, name = _PHASES[at]
        real = getattr(owner, name)

        def die(*arguments: Any, **options: Any) -> Any:
            if at == "writing":
                real(*arguments, **options)
                time.sleep(0.5)  # some bytes are there
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(owner, name, die)
    began = time.monotonic()
    with sender_for(urls, folder, transport) as sender:
        try:
            return {"ready": sender.update(sharded(folder, [dist.get_world_size()]), version).ready}
        except WeightSyncError as error:
            return {"raised": type(error).__name__, "message": str(error), "seconds": time.monotonic() - began}


_PHASES: dict[str, tuple[Any, str]] = {
    "beginning": (Update, "_agree"),
    "compiling": (Engine, "compile"),
    "opening": (EngineUpdate, "open"),
    "writing": (Target, "flush"),
    "ending": (EngineUpdate, "finish"),
}


class Stage(MemorySource):
    """A pipeline stage's part of a checkpoint: every rank of it has the same tensors."""

    def __init__(self, folder: str, stage: int, stages: int) -> None:
        tensors = dict(CheckpointSource(folder).tensors())
        layers = {name: int(name.split(".")[2]) for name in tensors if name.startswith("model.layers.")}
        per_stage = (max(layers.values()) + 1) / stages
        last = stages - 1

        def belongs(name: str) -> bool:
            if name in layers:
                return int(layers[name] / per_stage) == stage
            return stage == (0 if name.startswith("model.embed") else last)

        super().__init__({name: tensor for name, tensor in tensors.items() if belongs(name)})
        self.group = f"stage-{stage}"


def push_stages(urls: Sequence[str], folder: str, transport: str, stages: int) -> dict[str, Any]:
    """Every rank hands out its stage's part only."""
    stage = dist.get_rank() * stages // dist.get_world_size()
    with sender_for(urls, folder, transport) as sender:
        report = sender.update(Stage(folder, stage, stages), "staged")
        writers = [[group, *target, rank] for (group, target), rank in sender._writers.items()]
    return {**report.as_dict(), "writers": writers}
