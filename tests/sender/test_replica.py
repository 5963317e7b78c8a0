"""Replicas of real families: refused layouts, and the byte check that guards every program."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from weightsync_core.errors import EngineRefused, LayoutError
from weightsync_core.tables import Placement
from weightsync_devkit import zoo
from weightsync_devkit.engines import CPU_ARGUMENTS
from weightsync_sender.replica.compiled import _spec, _trace
from weightsync_sender.replica.execute import check_program
from weightsync_sender.replica.layout import LAYOUT_FIELDS, Layout, read_layout, refuse_unsupported
from weightsync_sender.replica.model import ReplicaModel, build_replica
from weightsync_sender.replica.program import OpaqueGroup, Program, TensorSpec
from weightsync_sender.replica.trace import Copy
from weightsync_sender.sources import CheckpointSource

CPU = torch.device("cpu")


def layout_of(folder: Path, *ranks: str) -> Layout:
    """What an engine started with these arguments would say."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    command = shlex.join(["--model-path", str(folder), *CPU_ARGUMENTS, *ranks])
    from weightsync_sender.replica.model import _Parser

    parser = _Parser()
    ServerArgs.add_cli_args(parser)
    arguments = ServerArgs.from_cli_args(parser.parse_args(shlex.split(command)))
    arguments.resolve_once()
    info: dict[str, Any] = {**arguments.resolved_dict(), "launch_command": command, "version": "0.5.23"}
    return read_layout(info, str(folder), "cpu")


def built(folder: Path, rank: int = 0, size: int = 1) -> tuple[ReplicaModel, Program, Mapping[str, TensorSpec]]:
    replica = build_replica(layout_of(folder, "--tp", str(size)), Placement(rank, rank, size), "target")
    specs = {name: _spec(meta) for name, meta in CheckpointSource(folder).manifest().items()}
    return replica, _trace(replica, specs), specs


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "qwen3_next", "qwen3_fp8"])
def test_a_program_equals_load_weights_and_any_altered_step_is_found(name: str, checkpoint: Callable[..., Path]) -> None:
    replica, program, specs = built(checkpoint(name, 1), 1, 2)
    assert check_program(replica, program, specs, CPU) == sum(program.parameters[n].nbytes for n in {u.parameter for u in program.units})
    altered = 0
    for index, unit in enumerate(program.units):
        step = unit.steps[-1]
        if not isinstance(step, Copy) or len(step.source_view.shape) < 2 or step.source_view.offset == 0:
            continue
        wrong = replace(step, source_view=replace(step.source_view, offset=step.source_view.offset - step.source_view.item))
        units = (*program.units[:index], replace(unit, steps=(*unit.steps[:-1], wrong)), *program.units[index + 1 :])
        with pytest.raises(LayoutError, match=unit.parameter.replace(".", r"\.")):
            check_program(replica, replace(program, units=units), specs, CPU)
        altered += 1
    assert altered > 3


def test_a_lost_unit_is_found_by_the_byte_check(checkpoint: Callable[..., Path]) -> None:
    replica, program, specs = built(checkpoint("qwen3", 1))
    fused = [unit for unit in program.units if unit.parameter.endswith("layers.0.self_attn.qkv_proj.weight")]
    assert len(fused) == 3
    with pytest.raises(LayoutError, match=r"qkv_proj\.weight"):
        check_program(replica, replace(program, units=tuple(unit for unit in program.units if unit is not fused[1])), specs, CPU)


def test_of_a_large_rank_alike_parameters_are_checked_once(checkpoint: Callable[..., Path]) -> None:
    replica, program, specs = built(checkpoint("qwen3", 1))
    every = check_program(replica, program, specs, CPU)
    assert 0 < check_program(replica, program, specs, CPU, budget=1 << 16) < every


def test_opaque_groups_are_filled_by_load_weights_itself(checkpoint: Callable[..., Path]) -> None:
    """The same parameter once as units and once as opaque group gives the same bytes."""
    from weightsync_sender.replica.execute import run_opaque, run_unit

    folder = checkpoint("qwen3_moe", 1)
    replica, program, specs = built(folder, 1, 2)
    name = "model.layers.0.self_attn.qkv_proj.weight"
    units = [unit for unit in program.units if unit.parameter == name]
    inputs = tuple(sorted({i for unit in units for i in unit.inputs}))
    group = OpaqueGroup((name,), inputs, "a test")
    rest = tuple(unit for unit in program.units if unit.parameter != name)
    check_program(replica, replace(program, units=rest, opaque=(group,)), specs, CPU)
    tensors = dict(CheckpointSource(folder).tensors())
    opaque = {name: torch.zeros(program.parameters[name].nbytes, dtype=torch.uint8)}
    run_opaque(replica, group, tensors, opaque)
    replayed = torch.zeros_like(opaque[name])
    for unit in units:
        run_unit(unit, tensors, replayed[unit.offset : unit.offset + unit.nbytes], program.temporaries)
    assert torch.equal(opaque[name], replayed)


def test_scale_blocks_that_a_rank_would_split_are_refused_with_the_numbers(tmp_path: Path) -> None:
    """384 wide experts at tensor parallel 2 are 192 per rank, no multiple of the block of 128."""
    config, tensors = zoo.make("qwen3_moe_fp8", 1, replace(zoo.FP8, expert_width=384))
    folder = zoo.save(tmp_path / "wide", config, tensors)
    with pytest.raises(LayoutError, match=r"192.*128") as caught:
        build_replica(layout_of(folder, "--tp", "2"), Placement(0, 0, 2), "target")
    assert "target rank 0 of 2" in str(caught.value)
    build_replica(layout_of(folder), Placement(0, 0, 1), "target")


@pytest.mark.parametrize(
    ("setting", "value", "words"),
    [
        ("ep_num_redundant_experts", 2, "redundant experts"),
        ("init_expert_location", "/tmp/map.json", "non-trivial expert location"),
        ("enable_eplb", True, "EPLB"),
        ("elastic_ep_backend", "mooncake", "elastic expert parallelism"),
        ("dwdp_size", 2, "DWDP"),
        ("kt_weight_path", "/kt", "KTransformers"),
        ("pp_size", 2, "pipeline parallelism in the engine"),
        ("weight_cache_mode", "client", "CUDA IPC"),
    ],
)
def test_placements_that_no_replica_reproduces_are_refused_by_name(setting: str, value: object, words: str) -> None:
    plain = {"speculative_algorithm": None, "pp_size": 1, "dwdp_size": 1, "init_expert_location": "trivial"}
    refuse_unsupported(plain)
    with pytest.raises(EngineRefused, match=words) as caught:
        refuse_unsupported({**plain, setting: value})
    assert f"{setting}={value!r}" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"speculative_draft_model_path": "/other"}, "separate draft checkpoint"),
        ({"enable_multi_layer_eagle": True}, "multi-layer EAGLE"),
        ({"speculative_moe_runner_backend": "triton", "moe_runner_backend": "deep_gemm"}, "draft MoE runner backend"),
        ({"speculative_moe_a2a_backend": "deepep", "moe_a2a_backend": "none"}, "draft MoE a2a backend"),
        ({"attn_dp_size": 2}, "attention data parallelism"),
    ],
)
def test_drafts_that_cannot_be_written_are_refused(changes: dict[str, object], words: str) -> None:
    plain = {"speculative_algorithm": "EAGLE", "model_path": "/m", "speculative_draft_model_path": "/m"}
    refuse_unsupported(plain)
    with pytest.raises(EngineRefused, match=words):
        refuse_unsupported({**plain, **changes})


def test_an_engine_that_resolves_its_arguments_otherwise_is_refused_with_both_values(checkpoint: Callable[..., Path]) -> None:
    layout = layout_of(checkpoint("qwen3_moe", 1))
    other = tuple((name, "triton" if name == "moe_runner_backend" else value) for name, value in layout.resolved)
    with pytest.raises(LayoutError, match="moe_runner_backend is 'triton' in the engine and 'auto' here"):
        build_replica(replace(layout, resolved=other), Placement(0, 0, 1), "target")


def test_layouts_are_equal_exactly_when_their_bytes_are(checkpoint: Callable[..., Path]) -> None:
    a, b = checkpoint("qwen3", 1), checkpoint("qwen3", 2)
    assert layout_of(a).key == layout_of(b).key
    assert len({layout_of(a).key, layout_of(a, "--tp", "2").key, layout_of(checkpoint("qwen2", 1)).key}) == 3
    assert {name for name, _ in layout_of(a).resolved} == set(LAYOUT_FIELDS)
