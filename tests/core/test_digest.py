import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightsync_core.digest import common_ranges, digest_text, lane_sums

RAW = torch.randint(0, 256, (4099,), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))


def digest(raw: torch.Tensor, ranges: list[tuple[int, int]] | None = None) -> str:
    return digest_text(lane_sums(raw, ranges or [(0, raw.numel())], torch))


@pytest.mark.parametrize("position", [0, 1, 8, 2047, 4090, 4098])
def test_one_flipped_bit_anywhere_changes_it(position: int) -> None:
    other = RAW.clone()
    other[position] ^= 1
    assert digest(other) != digest(RAW)


def test_swapped_words_moved_bytes_and_length_change_it() -> None:
    swapped = RAW.clone()
    swapped[:8], swapped[8:16] = RAW[8:16], RAW[:8]
    moved = torch.roll(RAW, 8)
    assert len({digest(RAW), digest(swapped), digest(moved), digest(RAW[:-1]), digest(torch.zeros(16, dtype=torch.uint8))}) == 5
    assert digest(torch.zeros(16, dtype=torch.uint8)) != digest(torch.zeros(24, dtype=torch.uint8))


@given(st.lists(st.integers(1, 200).map(lambda words: words * 8), min_size=1, max_size=6))
def test_sums_of_pieces_add_up_to_the_sum_of_the_whole(lengths: list[int]) -> None:
    total = [0, 0, 0]
    runs, at = [], 0
    for length in lengths:
        runs.append((at, length))
        for lane, value in enumerate(lane_sums(RAW.repeat(3)[at : at + length].clone(), [(at, length)], torch, base=at)):
            total[lane] += value
        at += length
    ranges = common_ranges(runs)
    assert ranges == [(0, at)]
    assert digest_text((total[0], total[1], total[2])) == digest(RAW.repeat(3)[:at].clone(), ranges)


def test_runs_that_split_a_word_stay_apart() -> None:
    assert common_ranges([(0, 6), (6, 10)]) == [(0, 6), (6, 10)]
    assert common_ranges([(8, 8), (0, 8), (24, 8)]) == [(0, 16), (24, 8)]
