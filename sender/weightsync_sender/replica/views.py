"""Strided views of flat memory, in bytes, as plain values.

A view is what ``torch.as_strided`` means, independent of any tensor: where it starts in its base, and shape and strides.
All arithmetic on programs is done on these, so it can be tested without torch or sglang.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Run = tuple[int, int]
"""(offset, length) in bytes."""


@dataclass(frozen=True, slots=True)
class View:
    """``shape`` elements of ``item`` bytes, ``strides`` bytes apart, from byte ``offset`` of a base."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item: int
    dtype: str
    """As ``torch.bfloat16`` without the prefix."""

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.count * self.item

    @property
    def span(self) -> Run:
        """The smallest (offset, length) that holds every element; length 0 for an empty view."""
        if self.count == 0:
            return self.offset, 0
        reach = sum((size - 1) * step for size, step in zip(self.shape, self.strides, strict=True))
        return self.offset, reach + self.item

    @property
    def contiguous(self) -> bool:
        """Whether the elements, in order, are one run of bytes."""
        expected = self.item
        for size, step in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and step != expected:
                return False
            expected *= size
        return True

    def shifted(self, by: int) -> View:
        """The same view, ``by`` bytes further into its base."""
        return View(self.offset + by, self.shape, self.strides, self.item, self.dtype)

    def blocks(self) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """(bytes of one innermost contiguous block, counts of the outer dimensions, their strides in bytes)."""
        block = self.item
        dims = [(size, step) for size, step in zip(self.shape, self.strides, strict=True) if size != 1]
        while dims and dims[-1][1] == block:
            block *= dims.pop()[0]
        return block, tuple(size for size, _ in dims), tuple(step for _, step in dims)


def covered_runs(views: Iterable[View]) -> tuple[Run, ...]:
    """Merged byte runs that the views touch, ascending. Exact: blocks are counted in their greatest common unit."""
    pieces = [view for view in views if view.count]
    if not pieces:
        return ()
    if all(view.contiguous for view in pieces):
        return merge_runs(view.span for view in pieces)
    runs: list[Run] = []
    for view in pieces:
        block, counts, steps = view.blocks()
        runs.extend((view.offset + at, block) for at in _offsets(counts, steps))
    return merge_runs(runs)


def _offsets(counts: Sequence[int], steps: Sequence[int]) -> list[int]:
    offsets = [0]
    for count, step in zip(counts, steps, strict=True):
        offsets = [base + index * step for base in offsets for index in range(count)]
    return offsets


def merge_runs(runs: Iterable[Run]) -> tuple[Run, ...]:
    """Merge overlapping and touching runs."""
    merged: list[list[int]] = []
    for start, length in sorted(run for run in runs if run[1]):
        if merged and start <= merged[-1][0] + merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], start + length - merged[-1][0])
        else:
            merged.append([start, length])
    return tuple((start, length) for start, length in merged)


def missing_runs(runs: Sequence[Run], nbytes: int) -> tuple[Run, ...]:
    """What merged ``runs`` leave open of ``nbytes`` bytes."""
    holes, at = [], 0
    for start, length in runs:
        if start > at:
            holes.append((at, start - at))
        at = max(at, start + length)
    if at < nbytes:
        holes.append((at, nbytes - at))
    return tuple(holes)
