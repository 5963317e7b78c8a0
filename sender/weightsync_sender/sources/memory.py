"""Tensors that the trainer already holds: a mapping, a list, or an iterable of (name, tensor)."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch.distributed.tensor import DTensor

from weightsync_core.errors import SourceError
from weightsync_sender.sources._base import Source, TensorMeta, meta_of, require_plain
from weightsync_sender.sources.sharded import ShardedSource

log = logging.getLogger(__name__)


class MemorySource:
    """Named tensors in memory; holds references, no copies."""

    keeps_tensors = True

    def __init__(self, named_tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = dict(named_tensors)
        for name, tensor in self._tensors.items():
            if not isinstance(tensor, torch.Tensor):
                raise SourceError(f"{name!r} is a {type(tensor).__name__}, expected a torch.Tensor", names=[name])
            require_plain(name, tensor)

    def manifest(self) -> Mapping[str, TensorMeta]:
        return {name: meta_of(tensor) for name, tensor in self._tensors.items()}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from ((name, tensor.detach()) for name, tensor in self._tensors.items())


def as_source(named_tensors: Source | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]) -> Source:
    """Take what a trainer has at hand.

    An iterable is read to its end first and its tensors are held until the update is over, since names, shapes and
    dtypes must be known before the first byte is written. To keep only a few tensors alive at a time, pass a ``Source``.

    Raises:
        SourceError: an item is no (name, tensor), or a name comes twice.
    """
    if isinstance(named_tensors, Source):
        return named_tensors
    if isinstance(named_tensors, Mapping):
        return _held(named_tensors)
    tensors: dict[str, torch.Tensor] = {}
    for item in named_tensors:
        if not (isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str)):
            raise SourceError(f"expected (name, tensor), got {type(item).__name__}")
        if item[0] in tensors:
            raise SourceError(f"tensor {item[0]!r} was given twice", names=[item[0]])
        tensors[item[0]] = item[1]
    return _held(tensors)


def _held(tensors: Mapping[str, torch.Tensor]) -> Source:
    sharded = any(isinstance(tensor, DTensor) for tensor in tensors.values())
    return ShardedSource(tensors) if sharded else MemorySource(tensors)
