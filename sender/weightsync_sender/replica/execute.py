"""Run a program's units on real tensors, and prove a program against the loader that it was traced from."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import torch

from weightsync_core.errors import LayoutError, listing
from weightsync_sender.replica.model import ReplicaModel
from weightsync_sender.replica.program import OpaqueGroup, Program, TensorSpec, Unit
from weightsync_sender.replica.trace import Fill, Kind
from weightsync_sender.replica.views import Run, View, merge_runs

_POISON = 0xA5


def typed(base: torch.Tensor, view: View) -> torch.Tensor:
    """A strided view of ``base``, whose first byte is offset 0 of the view; shares its memory."""
    item = view.item
    start = base.storage_offset() * base.element_size() + view.offset
    data = torch.empty(0, dtype=getattr(torch, view.dtype), device=base.device)
    return data.set_(base.untyped_storage(), start // item, view.shape, tuple(step // item for step in view.strides))


def run_unit(unit: Unit, tensors: Mapping[str, torch.Tensor], out: torch.Tensor, temporaries: Mapping[str, int]) -> None:
    """Fill the bytes of one unit.

    Args:
        tensors: the unit's HF tensors, contiguous, on any device.
        out: uint8 tensor of shape [unit.nbytes], aligned to the elements' size.
        temporaries: bytes of each temporary of the program.
    """
    scratch: dict[str, torch.Tensor] = {}
    for step in unit.steps:
        if step.target.kind is Kind.TEMPORARY:
            name = step.target.name
            if name not in scratch:
                scratch[name] = torch.empty(temporaries[name], dtype=torch.uint8, device=out.device)
            target = typed(scratch[name], step.target_view)
        else:
            target = typed(out, step.target_view.shifted(-unit.offset))
        if isinstance(step, Fill):
            target.fill_(step.value)
        elif step.source.kind is Kind.TEMPORARY:
            target.copy_(typed(scratch[step.source.name], step.source_view))
        else:
            target.copy_(typed(tensors[step.source.name], step.source_view))


def constant_runs(program: Program, manifest: Mapping[str, TensorSpec]) -> dict[str, tuple[Run, ...]]:
    """Bytes of parameters that do not depend on any HF tensor: the loader fills them with a constant.

    Found by running the few units that fill constants on two different inputs.
    """
    found: dict[str, list[Run]] = {}
    for unit in program.units:
        if not any(isinstance(step, Fill) for step in unit.steps):
            continue
        outs = []
        for value in (0x11, 0x22):
            tensors = {
                name: torch.full((manifest[name].nbytes,), value, dtype=torch.uint8)
                .view(getattr(torch, manifest[name].dtype))
                .view(manifest[name].shape)
                for name in unit.inputs
            }
            out = torch.full((unit.nbytes,), _POISON, dtype=torch.uint8)
            run_unit(unit, tensors, out, program.temporaries)
            outs.append(out)
        same = (outs[0] == outs[1]).tolist() if unit.inputs else None
        for start, length in unit.runs:
            if same is None:
                found.setdefault(unit.parameter, []).append((start, length))
            else:
                found.setdefault(unit.parameter, []).extend((at, 1) for at in range(start, start + length) if same[at - unit.offset])
    merged = {name: merge_runs(runs) for name, runs in found.items()}
    # Where elements are converted, single bytes of different values may agree: only whole elements count.
    items = {name: program.parameters[name].item for name in merged}
    whole = {name: tuple(run for run in runs if run[1] >= items[name]) for name, runs in merged.items()}
    return {name: runs for name, runs in whole.items() if runs}


def run_opaque(replica: ReplicaModel, group: OpaqueGroup, tensors: Mapping[str, torch.Tensor], outs: Mapping[str, torch.Tensor]) -> None:
    """Fill an opaque group's parameters through ``load_weights`` itself.

    Args:
        tensors: all HF tensors of the group.
        outs: uint8 tensors by parameter, each of the parameter's size.
    """
    storages = {name: as_parameter(outs[name], replica.specs[name]) for name in group.parameters}
    device = next(iter(storages.values())).device
    with replica.materialised(storages):
        replica.load((name, tensors[name].to(device)) for name in group.inputs)


def as_parameter(raw: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """Flat bytes seen as a contiguous tensor of the parameter's shape and dtype."""
    return typed(raw, View(0, (spec.nbytes // spec.item,), (spec.item,), spec.item, spec.dtype)).view(spec.shape)


def check_program(
    replica: ReplicaModel, program: Program, manifest: Mapping[str, TensorSpec], device: torch.device, budget: int = 1 << 30
) -> int:
    """Compare a program with one real ``load_weights`` on random tensors, byte for byte, poison included.

    Parameters are taken in batches of at most ``budget`` bytes. Where the whole rank is larger than that, of parameters
    that are filled alike (same names but for their numbers, same steps) the first is compared.

    Returns:
        Bytes compared.

    Raises:
        LayoutError: a byte differs; names the parameters.
    """
    by_parameter: dict[str, list[Unit]] = {name: [] for name in program.parameters}
    for unit in program.units:
        by_parameter[unit.parameter].append(unit)
    names = [name for name, units in by_parameter.items() if units]
    if sum(program.parameters[name].nbytes for name in names) > budget:
        names = list({_signature(by_parameter[name]): name for name in reversed(names)}.values())
    compared = 0
    roomy = sum(spec.nbytes for spec in manifest.values()) + 2 * sum(program.parameters[name].nbytes for name in names) <= 2 * budget
    for batch in [names] if roomy else _batches(names, by_parameter, program, manifest, budget):
        # Where there is room, the loader gets tensors that no unit uses, too: it may do with them what the trace did not see.
        needed = None if roomy else {i for name in batch for unit in by_parameter[name] for i in unit.inputs}
        compared += _check_batch(replica, program, manifest, {name: by_parameter[name] for name in batch}, needed, device)
    for group in program.opaque:
        _check_opaque(replica, group, program, manifest, device)
    return compared


def _signature(units: Sequence[Unit]) -> str:
    """Equal for parameters that are filled alike in every layer: numbers in names are replaced by their order of appearance."""
    order: dict[str, str] = {}
    text = repr([(unit.parameter, unit.offset, unit.steps) for unit in units])
    return re.sub(r"\.(\d+)\.", lambda match: f".<{order.setdefault(match[1], str(len(order)))}>.", text)


def _batches(
    names: Iterable[str], units: Mapping[str, Sequence[Unit]], program: Program, manifest: Mapping[str, TensorSpec], budget: int
) -> Iterable[list[str]]:
    batch: list[str] = []
    size = 0
    for name in names:
        need = 2 * program.parameters[name].nbytes + sum(manifest[i].nbytes for i in {i for u in units[name] for i in u.inputs})
        if batch and size + need > budget:
            yield batch
            batch, size = [], 0
        batch.append(name)
        size += need
    if batch:
        yield batch


def _check_batch(
    replica: ReplicaModel,
    program: Program,
    manifest: Mapping[str, TensorSpec],
    units: Mapping[str, Sequence[Unit]],
    needed: set[str] | None,
    device: torch.device,
) -> int:
    tensors = {name: _random(spec, device) for name, spec in manifest.items() if needed is None or name in needed}
    loaded = {name: _poisoned(program.parameters[name], device) for name in units}
    replayed = {name: _poisoned(program.parameters[name], device) for name in units}
    with replica.materialised({name: as_parameter(raw, program.parameters[name]) for name, raw in loaded.items()}):
        replica.load(iter(tensors.items()))
    for name, some in units.items():
        for unit in some:
            piece = torch.full((unit.nbytes,), _POISON, dtype=torch.uint8, device=device)
            run_unit(unit, tensors, piece, program.temporaries)
            for start, length in unit.runs:
                replayed[name][start : start + length] = piece[start - unit.offset : start - unit.offset + length]
    wrong = [name for name in units if not torch.equal(loaded[name], replayed[name])]
    if wrong:
        raise LayoutError(
            f"the program of {replica.role} differs from load_weights in {listing(wrong)}: the loader does something that the trace did "
            "not see. Nothing was written; please report the model"
        )
    return sum(program.parameters[name].nbytes for name in units)


def _check_opaque(
    replica: ReplicaModel, group: OpaqueGroup, program: Program, manifest: Mapping[str, TensorSpec], device: torch.device
) -> None:
    """An opaque parameter must be filled whole: what two loads over different poison leave different was not filled."""
    tensors = {name: _random(manifest[name], device) for name in group.inputs}
    results = []
    for poison in (_POISON, 0x5A):
        outs = {name: _poisoned(program.parameters[name], device, poison) for name in group.parameters}
        run_opaque(replica, group, tensors, outs)
        results.append(outs)
    holes = [name for name in group.parameters if not torch.equal(results[0][name], results[1][name])]
    if holes:
        raise LayoutError(
            f"load_weights leaves parts of {listing(holes)} unfilled (they went through it because of {group.reason}); a part of a "
            "parameter cannot be written alone there. Update this engine by broadcast"
        )


def _poisoned(spec: TensorSpec, device: torch.device, value: int = _POISON) -> torch.Tensor:
    return torch.full((spec.nbytes,), value, dtype=torch.uint8, device=device)


def _random(spec: TensorSpec, device: torch.device) -> torch.Tensor:
    """Random values without NaN, whose bits copies and conversions keep."""
    raw = torch.randint(0, 256, (spec.nbytes,), dtype=torch.uint8, device=device)
    dtype = getattr(torch, spec.dtype)
    if not dtype.is_floating_point:
        return raw.view(dtype).view(spec.shape)
    if spec.item == 1:
        return (raw & 0x77).view(dtype).view(spec.shape)
    return torch.randn(spec.shape, device=device).to(dtype)
