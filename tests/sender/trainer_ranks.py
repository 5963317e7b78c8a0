"""What trainer ranks do in tests; run in processes of their own (:mod:`weightsync_devkit.trainers`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from weightsync_sender import CheckpointSource, SenderSettings, UpdateFailed, Verify, WeightSender


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
