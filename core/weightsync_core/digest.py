"""A position-dependent 128-bit checksum of raw bytes, taken where the bytes lie.

Both ends compute it with their own torch, which they pass in, so that core itself needs no array library. It finds
lost, moved, doubled and flipped bytes; it is no defence against somebody who wants a collision.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_SPREAD = (-7046029254386353131, -4417276706812531889)
_MIX = (-4658895280553007687, -7723592293110705685)
_MASK = (1 << 64) - 1
_CHUNK = 1 << 22
"""Words of eight bytes hashed at once: bounds the temporary memory to about 130 MiB."""


def lane_sums(raw: Any, ranges: Iterable[tuple[int, int]], torch: Any, base: int = 0) -> tuple[int, int, int]:
    """Sums over byte ranges of one parameter; sums of disjoint ranges may be added up (modulo 2**64 per lane).

    Args:
        raw: uint8 tensor of shape [nbytes], contiguous, on any device; its first byte is the parameter's byte ``base``.
        ranges: (offset, length) pairs in bytes from the parameter's start. Both ends must use the same ranges.
        torch: the torch module.

    Returns:
        (first lane, second lane, bytes covered).
    """
    sums, covered = [0, 0], 0
    for offset, length in ranges:
        covered += length
        for start in range(0, length, _CHUNK * 8):
            first = offset - base + start
            part = raw[first : first + min(_CHUNK * 8, length - start)]
            if part.numel() % 8 == 0 and part.data_ptr() % 8 == 0:
                words = part.view(torch.int64)
            else:
                padded = torch.zeros(-(-part.numel() // 8) * 8, dtype=torch.uint8, device=raw.device)
                padded[: part.numel()] = part
                words = padded.view(torch.int64)
            positions = torch.arange(words.numel(), dtype=torch.int64, device=raw.device) * 8 + (offset + start)
            for lane in (0, 1):
                sums[lane] += int(_terms(words, positions, lane).sum())
    return sums[0] & _MASK, sums[1] & _MASK, covered


def digest_text(sums: tuple[int, int, int]) -> str:
    """32 hexadecimal digits, a colon, and the number of bytes covered."""
    return f"{sums[0] & _MASK:016x}{sums[1] & _MASK:016x}:{sums[2]}"


def common_ranges(runs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ascending ranges with neighbours joined where the sums stay the same (whole words of eight bytes)."""
    joined: list[tuple[int, int]] = []
    for start, length in sorted(runs):
        if joined and joined[-1][0] + joined[-1][1] == start and joined[-1][1] % 8 == 0:
            joined[-1] = (joined[-1][0], joined[-1][1] + length)
        else:
            joined.append((start, length))
    return joined


def _terms(words: Any, positions: Any, lane: int) -> Any:
    mixed = (words ^ (positions * _SPREAD[lane])) * _MIX[lane]
    mixed = (mixed ^ ((mixed >> 29) & 0x7FFFFFFFF)) * _SPREAD[1 - lane]
    return mixed ^ ((mixed >> 32) & 0xFFFFFFFF)
