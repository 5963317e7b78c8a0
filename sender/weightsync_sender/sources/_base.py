"""The protocol of a source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch.distributed.tensor import DTensor

from weightsync_core.errors import SourceError


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Shape and dtype of one HF tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@runtime_checkable
class Source(Protocol):
    """Named HF tensors.

    A source may set ``keeps_tensors = True``: its tensors exist anyway (or are mapped files), so that holding all of them
    until the update is over costs nothing. Else only about a buffer's worth is held at a time. With ``collective = True`` the trainer
    ranks make its tensors together, so each goes through to the end. ``group`` names the ranks that hand out the same tensors, where
    not all do (a pipeline stage).
    """

    def manifest(self) -> Mapping[str, TensorMeta]:
        """All tensors that ``tensors`` will hand out. Cheap; called at every update."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Hand out every tensor of the manifest once. May be called once per update, and again for a second pass."""


def is_collective(source: Source) -> bool:
    """Whether all trainer ranks must go through the source to its end."""
    return bool(getattr(source, "collective", False))


def require_plain(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor that is not whole, dense memory of this process.

    Raises:
        SourceError: a DTensor, a meta or a sparse tensor.
    """
    if isinstance(tensor, DTensor):
        raise SourceError(f"{name!r} is a DTensor, a part of the tensor; gather it first: tensor.full_tensor()", names=[name])
    if tensor.device.type == "meta" or tensor.layout is not torch.strided:
        raise SourceError(f"{name!r} is on {tensor.device} with layout {tensor.layout}, expected dense memory", names=[name])


def meta_of(tensor: torch.Tensor) -> TensorMeta:
    """Shape and dtype of a tensor."""
    return TensorMeta(tuple(tensor.shape), tensor.dtype)
