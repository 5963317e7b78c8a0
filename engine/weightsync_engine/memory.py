"""Which memory a model's parameters lie in, as spans that a transport can register.

In: a torch module. Out: rows of the parameter table, and (address, length) spans that cover every parameter. Parameters
that share storage (tied embeddings, a draft that borrows the target's head) appear under every name but are covered once.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from typing import Any

import torch

_CUDA_ROUNDING = 512
"""torch's CUDA allocator rounds blocks up to this many bytes, so neighbours may leave gaps below it."""


def describe_parameters(model: torch.nn.Module) -> dict[str, list[Any]]:
    """Rows ``name -> [address, bytes, element size, dtype, shape, stride]`` of all parameters, as they are now."""
    return {
        name: [
            parameter.data_ptr() if parameter.numel() else 0,
            parameter.numel() * parameter.element_size(),
            parameter.element_size(),
            str(parameter.dtype).removeprefix("torch."),
            list(parameter.shape),
            list(parameter.stride()),
        ]
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def parameter_spans(model: torch.nn.Module) -> list[tuple[int, int]]:
    """Disjoint (address, length) spans over the memory of all parameters, ascending.

    On CUDA, neighbouring blocks of one allocator segment are merged: registration costs time and a network card's
    limited regions by the span, and a region must not cross segments.
    """
    pieces = []
    for parameter in model.parameters():
        if parameter.numel():
            extent = 1 + sum((size - 1) * step for size, step in zip(parameter.shape, parameter.stride(), strict=True))
            pieces.append((parameter.data_ptr(), extent * parameter.element_size()))
    if any(parameter.is_cuda for parameter in model.parameters()):
        segments = sorted((segment["address"], segment["total_size"]) for segment in torch.cuda.memory_snapshot())
        return merge_spans(pieces, gap=_CUDA_ROUNDING, bounds=[start for start, _ in segments])
    return merge_spans(pieces)


def merge_spans(pieces: Iterable[tuple[int, int]], gap: int = 0, bounds: list[int] | None = None) -> list[tuple[int, int]]:
    """Merge overlapping pieces, and those at most ``gap`` bytes apart that lie between the same two ``bounds``."""
    merged: list[list[int]] = []
    for start, length in sorted(pieces):
        if merged:
            last = merged[-1]
            end = last[0] + last[1]
            near = start < end or (gap and start - end < gap and _segment(start, bounds) == _segment(last[0], bounds))
            if near:
                last[1] = max(end, start + length) - last[0]
                continue
        merged.append([start, length])
    return [(start, length) for start, length in merged]


def _segment(address: int, bounds: list[int] | None) -> int:
    return bisect.bisect_right(bounds, address) if bounds else 0


def raw_bytes(parameter: torch.Tensor) -> torch.Tensor:
    """The parameter's elements as a flat uint8 tensor; a view where its layout allows, else a copy in logical order."""
    data = parameter.detach()
    if data.dim() == 0:
        data = data.reshape(1)
    return data.contiguous().view(torch.uint8).reshape(-1)
