import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from weightsync_engine.memory import describe_parameters, merge_spans, parameter_spans, raw_bytes


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 50)), max_size=20))
def test_merged_spans_are_disjoint_and_cover_the_same_bytes(pieces: list[tuple[int, int]]) -> None:
    merged = merge_spans(pieces)
    assert {b for s, n in merged for b in range(s, s + n)} == {b for s, n in pieces for b in range(s, s + n)}
    assert all(a[0] + a[1] <= b[0] for a, b in itertools.pairwise(merged))


def test_gaps_are_bridged_within_a_segment_only() -> None:
    pieces = [(0, 100), (500, 100), (1024, 100), (2000, 100)]
    assert merge_spans(pieces, gap=512, bounds=[0, 1024]) == [(0, 600), (1024, 100), (2000, 100)]
    assert merge_spans(pieces, gap=512, bounds=[0]) == [(0, 1124), (2000, 100)]


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(4, 6, bias=False)
        self.head = torch.nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.turned = torch.nn.Parameter(torch.randn(3, 5).t())
        self.none = torch.nn.Parameter(torch.empty(0))


def test_tied_strided_and_empty_parameters_are_described_and_covered_once() -> None:
    model = Tied()
    rows = describe_parameters(model)
    assert rows["head.weight"] == rows["embed.weight"]
    assert rows["turned"][4:] == [[5, 3], [1, 5]]
    assert rows["none"][:2] == [0, 0]
    spans = parameter_spans(model)
    assert sum(length for _, length in spans) == (24 + 15) * 4
    assert torch.equal(raw_bytes(model.turned).view(torch.float32).view(5, 3), model.turned)
