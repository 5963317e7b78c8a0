import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from weightsync_sender.replica.execute import typed
from weightsync_sender.replica.views import View, covered_runs, merge_runs, missing_runs


@st.composite
def views(draw: st.DrawFn) -> View:
    """Views as slicing and transposing make them, into 4096 bytes."""
    item, dtype = draw(st.sampled_from([(1, "uint8"), (2, "bfloat16"), (4, "float32")]))
    base = torch.empty(16, 8, 4, device="meta")
    for dim in range(3):
        low = draw(st.integers(0, base.shape[dim] - 1))
        base = base.narrow(dim, low, draw(st.integers(0, base.shape[dim] - low)))
    if draw(st.booleans()):
        base = base.transpose(draw(st.integers(0, 2)), draw(st.integers(0, 2)))
    return View(base.storage_offset() * item, tuple(base.shape), tuple(step * item for step in base.stride()), item, dtype)


def touched(view: View) -> set[int]:
    raw = torch.zeros(4096, dtype=torch.uint8)
    typed(raw, view).fill_(1) if view.item == 1 else typed(
        raw, View(view.offset, (*view.shape, view.item), (*view.strides, 1), 1, "uint8")
    ).fill_(1)
    return set(raw.nonzero().flatten().tolist())


@given(st.lists(views(), max_size=4))
def test_covered_runs_are_exactly_the_touched_bytes(some: list[View]) -> None:
    runs = covered_runs(some)
    expected = set().union(*(touched(view) for view in some)) if some else set()
    assert {at for start, length in runs for at in range(start, start + length)} == expected
    assert all(a[0] + a[1] < b[0] for a, b in itertools.pairwise(runs))


@given(views())
def test_span_and_contiguity_agree_with_torch(view: View) -> None:
    bytes_touched = touched(view)
    if view.count:
        assert view.span == (min(bytes_touched), max(bytes_touched) - min(bytes_touched) + 1)
    tensor = torch.empty(0, dtype=getattr(torch, view.dtype)).set_(
        torch.empty(4096, dtype=torch.uint8).untyped_storage(),
        view.offset // view.item,
        view.shape,
        tuple(s // view.item for s in view.strides),
    )
    if view.count:
        assert view.contiguous == tensor.is_contiguous()


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=10))
def test_missing_runs_are_the_rest(runs: list[tuple[int, int]]) -> None:
    merged = merge_runs(runs)
    taken = {at for start, length in runs for at in range(start, start + length)}
    holes = {at for start, length in missing_runs(merged, 90) for at in range(start, start + length)}
    assert holes == set(range(90)) - taken
