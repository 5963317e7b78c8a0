"""Tensors that are spread over trainer ranks: state dicts of FSDP2 and other users of DTensor.

Every rank hands out the same whole tensors in the same order, one at a time, gathered from all; so every rank must go through to
the end, whatever becomes of its own writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch.distributed.tensor import DTensor

from weightsync_core.errors import SourceError
from weightsync_sender.sources._base import TensorMeta, require_plain


class ShardedSource:
    """A mapping whose tensors may be DTensors, of any mesh and placement, uneven shards included."""

    keeps_tensors = False
    collective = True

    def __init__(self, named_tensors: Mapping[str, torch.Tensor]) -> None:
        """Hold references, no copies.

        Raises:
            SourceError: a value is no tensor, or neither a DTensor nor dense memory.
        """
        self._tensors = dict(named_tensors)
        for name, tensor in self._tensors.items():
            if not isinstance(tensor, torch.Tensor):
                raise SourceError(f"{name!r} is a {type(tensor).__name__}, expected a torch.Tensor", names=[name])
            if not isinstance(tensor, DTensor):
                require_plain(name, tensor)

    @property
    def ranks(self) -> int:
        """The most trainer ranks that one tensor is spread over."""
        return max((tensor.device_mesh.size() for tensor in self._tensors.values() if isinstance(tensor, DTensor)), default=1)

    def manifest(self) -> Mapping[str, TensorMeta]:
        return {name: TensorMeta(tuple(tensor.shape), tensor.dtype) for name, tensor in self._tensors.items()}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._tensors.items():
            whole = tensor.detach()
            yield name, whole.full_tensor() if isinstance(whole, DTensor) else whole
