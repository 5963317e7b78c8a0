"""Programs traced from small loaders that do what sglang's do: slices, fusions, conversions, and what is no copy."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from weightsync_core.errors import SourceError
from weightsync_sender.replica.execute import constant_runs, run_unit
from weightsync_sender.replica.program import Program, TensorSpec, compile_program, lossy_casts, require_complete, unfilled, unread
from weightsync_sender.replica.trace import ValueReadError, trace_loading

Loader = Callable[[dict[str, torch.Tensor], Iterator[tuple[str, torch.Tensor]]], Any]
POISON = 0xA5


def spec(tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.element_size())


def compiled(loader: Loader, parameters: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor]) -> Program:
    params = {name: torch.empty_like(tensor, device="meta") for name, tensor in parameters.items()}
    given = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in tensors.items()}
    trace = trace_loading(params, [], given, lambda weights: loader(params, weights))
    return compile_program(trace, {name: spec(tensor) for name, tensor in parameters.items()})


def replayed(program: Program, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    out = {name: torch.full((s.nbytes,), POISON, dtype=torch.uint8) for name, s in program.parameters.items()}
    for unit in program.units:
        piece = torch.full((unit.nbytes,), 0x11, dtype=torch.uint8)
        run_unit(unit, tensors, piece, program.temporaries)
        for start, length in unit.runs:
            out[unit.parameter][start : start + length] = piece[start - unit.offset : start - unit.offset + length]
    return out


def check(loader: Loader, parameters: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor]) -> Program:
    """Replay equals the loader itself, poison included."""
    program = compiled(loader, parameters, tensors)
    real = {name: torch.full((s.nbytes,), POISON, dtype=torch.uint8) for name, s in program.parameters.items()}
    views = {name: real[name].view(parameters[name].dtype).view(parameters[name].shape) for name in parameters}
    loader(views, iter(tensors.items()))
    for name, raw in replayed(program, tensors).items():
        assert torch.equal(raw, real[name]), name
    return program


def rand(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


def test_rows_of_a_fused_projection_are_direct_and_columns_are_packed() -> None:
    def load(p: dict[str, torch.Tensor], weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, w in weights:
            if name == "down":
                p["down"].copy_(w.narrow(1, 4, 4))
            else:
                p["gate_up"].narrow(0, 0 if name == "gate" else 4, 4).copy_(w.narrow(0, 4, 4))

    program = check(load, {"gate_up": rand(8, 6), "down": rand(6, 4)}, {"gate": rand(8, 6), "up": rand(8, 6), "down": rand(6, 8)})
    direct = {unit.inputs[0]: unit.direct for unit in program.units}
    assert direct == {"gate": ("gate", 4 * 6 * 2), "up": ("up", 4 * 6 * 2), "down": None}
    assert not unfilled(program)
    assert set(unread([program], {"gate": TensorSpec((8, 6), "bfloat16", 2), "down": TensorSpec((6, 8), "bfloat16", 2)})) == {
        "gate",
        "down",
    }


def test_overlapping_and_interleaved_writes_stay_in_order() -> None:
    def load(p: dict[str, torch.Tensor], weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        given = dict(weights)
        p["w"].zero_()
        p["w"][:, 0::2].copy_(given["even"])
        p["w"][1:, 1::2].copy_(given["odd"][1:])
        p["w"][3].copy_(given["row"])

    program = check(load, {"w": rand(4, 6)}, {"even": rand(4, 3), "odd": rand(4, 3), "row": rand(6)})
    (unit,) = program.units
    assert unit.inputs == ("even", "odd", "row")


def test_holes_inside_interleaved_writes_are_not_written_and_reported() -> None:
    def load(p: dict[str, torch.Tensor], weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for _, w in weights:
            p["w"][:, :2].copy_(w)

    program = check(load, {"w": rand(4, 6)}, {"part": rand(4, 2)})
    assert unfilled(program) == {"w": ((4, 8), (16, 8), (28, 8), (40, 8))}
    assert program.written == 16


def test_concatenation_through_a_temporary_becomes_direct() -> None:
    def load(p: dict[str, torch.Tensor], weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        given = dict(weights)
        p["fused"].copy_(torch.cat([given["a"], given["b"]], dim=0))

    program = check(load, {"fused": rand(6, 4)}, {"a": rand(2, 4), "b": rand(4, 4)})
    assert sorted(unit.direct for unit in program.units if unit.direct) == [("a", 0), ("b", 0)]


def test_concatenation_of_columns_is_replayed_through_its_temporary() -> None:
    def load(p: dict[str, torch.Tensor], weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        given = dict(weights)
        joined = torch.cat([given["a"], given["b"]], dim=1).clone()
        p["w"].copy_(joined.t().contiguous()[1:4])

    check(load, {"w": rand(3, 5)}, {"a": rand(5, 2), "b": rand(5, 4)})


def test_a_reused_temporary_is_read_as_it_was_then() -> None:
    def load(p: dict[str, torch.Tensor], weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        scratch = torch.empty(2, 3, dtype=torch.bfloat16, device=p["x"].device)
        for name, w in weights:
            scratch.copy_(w.t())
            p[name].copy_(scratch)

    check(load, {"x": rand(2, 3), "y": rand(2, 3)}, {"x": rand(3, 2), "y": rand(3, 2)})


def test_conversions_fills_and_views_of_other_dtypes_are_steps() -> None:
    def load(p: dict[str, torch.Tensor], weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        given = dict(weights)
        p["wide"].copy_(given["narrow"])
        p["bytes"].view(torch.uint8).copy_(given["raw"])
        p["padded"][:3].copy_(given["rows"])
        p["padded"][3:].fill_(0)

    program = check(
        load,
        {"wide": rand(4, dtype=torch.float32), "bytes": rand(4, 4).to(torch.float8_e4m3fn), "padded": rand(5, 2)},
        {"narrow": rand(4), "raw": torch.randint(0, 255, (4, 4), dtype=torch.uint8), "rows": rand(3, 2)},
    )
    assert not unfilled(program)


def test_arithmetic_makes_a_parameter_opaque_with_everything_that_flows_in() -> None:
    def load(p: dict[str, torch.Tensor], weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        given = dict(weights)
        p["scaled"][:2].copy_(given["a"] * 2)
        p["scaled"][2:].copy_(given["b"])
        p["plain"].copy_(given["c"])

    program = compiled(load, {"scaled": rand(4), "plain": rand(2)}, {"a": rand(2), "b": rand(2), "c": rand(2)})
    (group,) = program.opaque
    assert (group.parameters, group.inputs, group.reason) == (("scaled",), ("a", "b"), "mul")
    assert [unit.parameter for unit in program.units] == ["plain"]


def test_arithmetic_that_reaches_no_parameter_is_ignored() -> None:
    def load(p: dict[str, torch.Tensor], weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for _, w in weights:
            p["w"].copy_(w)
            _ = (w.float() + 1).sum()

    assert not compiled(load, {"w": rand(2)}, {"w": rand(2)}).opaque


def test_in_place_arithmetic_on_a_parameter_makes_it_opaque() -> None:
    def load(p: dict[str, torch.Tensor], weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for _, w in weights:
            p["w"].copy_(w)
            p["w"].add_(1)

    (group,) = compiled(load, {"w": rand(2)}, {"x": rand(2)}).opaque
    assert (group.parameters, group.inputs) == (("w",), ("x",))


def test_a_read_of_values_is_reported_and_taints_what_it_reaches() -> None:
    def load(p: dict[str, torch.Tensor], weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, w in weights:
            if name == "flag" and w.item() > 1:
                continue
            p["w"].copy_(w) if name != "flag" else p["f"].copy_(w)

    parameters = {"w": torch.empty(2, device="meta"), "f": torch.empty(1, device="meta")}
    meta = {"flag": torch.empty(1, device="meta"), "x": torch.empty(2, device="meta")}
    with pytest.raises(ValueReadError) as caught:
        trace_loading(parameters, [], meta, lambda weights: load(parameters, weights))
    assert caught.value.name == "flag"
    real = {**meta, "flag": torch.zeros(1)}
    trace = trace_loading(parameters, [], real, lambda weights: load(parameters, weights), value_dependent={"flag"})
    assert set(trace.opaque) == {"f"}


def test_the_tensor_that_a_loader_refuses_is_named() -> None:
    def load(p: dict[str, torch.Tensor], weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, w in weights:
            assert p[name].shape == w.shape

    with pytest.raises(SourceError, match=r"refused HF tensor 'b' \(shape \[3\]") as caught:
        compiled(load, {"a": rand(2), "b": rand(2)}, {"a": rand(2), "b": rand(3)})
    assert caught.value.names == ("b",)


def expert_loader(p: dict[str, torch.Tensor], weights: Iterator[tuple[str, torch.Tensor]]) -> None:
    for name, w in weights:
        layer, expert, part = re.fullmatch(r"layers\.(\d)\.experts\.(\d)\.(gate|up)", name).groups()  # type: ignore[union-attr]
        at = 0 if part == "gate" else 2
        p[f"layers.{layer}.w13"][int(expert)].narrow(0, at, 2).copy_(w)


def test_missing_tensors_are_guessed_from_sisters() -> None:
    names = [f"layers.{layer}.experts.{expert}.{part}" for layer in range(2) for expert in range(3) for part in ("gate", "up")]
    tensors = {name: rand(2, 2) for name in names if name != "layers.1.experts.2.up"}
    parameters = {f"layers.{layer}.w13": rand(3, 4, 2) for layer in range(2)}
    program = compiled(expert_loader, parameters, tensors)
    specs = {name: spec(tensor) for name, tensor in tensors.items()}
    with pytest.raises(SourceError, match=re.escape("missing HF tensor layers.1.experts.2.up")) as caught:
        require_complete(
            {"rank 0": program}, specs, constants={"rank 0": {}}, exempt={"rank 0": frozenset()}, allow_unused=[], allow_cast=False
        )
    assert caught.value.names == ("layers.1.w13", "layers.1.experts.2.up")


def test_leftover_tensors_and_rounding_are_errors_unless_allowed() -> None:
    def load(p: dict[str, torch.Tensor], weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, w in weights:
            if name in p:
                p[name].copy_(w)

    tensors = {"a": rand(2, dtype=torch.float32), "stray": rand(2)}
    program = compiled(load, {"a": rand(2)}, tensors)
    specs = {name: spec(tensor) for name, tensor in tensors.items()}

    def judge(allow: list[str], cast: bool) -> tuple[str, ...]:
        patterns = [re.compile(pattern) for pattern in allow]
        return require_complete(
            {"r": program}, specs, constants={"r": {}}, exempt={"r": frozenset()}, allow_unused=patterns, allow_cast=cast
        )

    with pytest.raises(SourceError, match="a would be rounded from float32 to bfloat16 on its way into parameter a"):
        judge(["stray"], False)
    with pytest.raises(SourceError, match="stray is not used by any rank in all 4 bytes"):
        judge([], True)
    assert judge(["^stray$"], True) == ("stray",)


def test_rounding_on_the_way_through_a_temporary_is_found() -> None:
    def load(p: dict[str, torch.Tensor], weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        given = dict(weights)
        p["fused"].copy_(torch.cat([given["a"], given["b"]]))

    tensors = {"a": rand(2, 4, dtype=torch.float32), "b": rand(2, 4, dtype=torch.float32)}
    program = check(load, {"fused": rand(4, 4)}, tensors)
    assert set(lossy_casts(program)) == {"a", "b"}


def test_bytes_that_depend_on_no_tensor_are_found() -> None:
    def load(p: dict[str, torch.Tensor], weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        given = dict(weights)
        p["padded"].zero_()
        p["padded"][:, :2].copy_(given["narrow"])
        p["joined"].copy_(torch.cat([given["short"], torch.zeros(1, 4, dtype=torch.bfloat16, device=given["short"].device)]))
        p["whole"].zero_()
        p["whole"].copy_(given["full"])

    tensors = {"narrow": rand(2, 2), "short": rand(2, 4), "full": rand(4)}
    program = check(load, {"padded": rand(2, 4), "joined": rand(3, 4), "whole": rand(4)}, tensors)
    specs = {name: spec(tensor) for name, tensor in tensors.items()}
    constants = constant_runs(program, specs)
    assert constants == {"padded": ((4, 4), (12, 4)), "joined": ((16, 8),)}
    with pytest.raises(SourceError, match=r"parameter joined would be padded by the loader in bytes 16\.\.24 of 24.*short \[2, 4\]"):
        require_complete({"r": program}, specs, constants={"r": constants}, exempt={"r": frozenset()}, allow_unused=[], allow_cast=False)
