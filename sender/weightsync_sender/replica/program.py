"""From a trace to a program: which byte runs of which parameter come from which Hugging Face tensors.

Pure values, no torch, no sglang. A program is a list of units; a unit is the smallest piece that is written as a whole:
one span of one parameter with the steps that fill it. A unit whose bytes already lie in one run of an HF tensor is
``direct``: it needs no copy. Opaque groups (see :mod:`.trace`) are filled by ``load_weights`` and listed beside.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from weightsync_core.errors import SourceError, listing
from weightsync_sender.replica.trace import Copy, Fill, Kind, Step, Trace
from weightsync_sender.replica.views import Run, View, covered_runs, merge_runs, missing_runs


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of an HF tensor or a parameter."""

    shape: tuple[int, ...]
    dtype: str
    item: int

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        total = self.item
        for size in self.shape:
            total *= size
        return total


@dataclass(frozen=True)
class Unit:
    """One span of one parameter, filled as a whole."""

    parameter: str
    offset: int
    """Bytes from the start of the parameter."""
    nbytes: int
    """Bytes of the span, holes included."""
    steps: tuple[Step, ...]
    inputs: tuple[str, ...]
    """HF tensors that must be at hand."""
    runs: tuple[Run, ...]
    """What is written, relative to the parameter's start; one run that equals the span unless it has holes."""
    direct: tuple[str, int] | None = None
    """(HF tensor, byte offset in it) when the span is one run of that tensor already."""

    @property
    def written(self) -> int:
        """Bytes that go over the wire."""
        return sum(length for _, length in self.runs)


@dataclass(frozen=True)
class OpaqueGroup:
    """Parameters that only the engine's own ``load_weights`` can fill, with all HF tensors that it needs for them."""

    parameters: tuple[str, ...]
    inputs: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Program:
    """Everything one (layout, role, rank) does with one set of HF tensors."""

    parameters: Mapping[str, TensorSpec]
    units: tuple[Unit, ...]
    opaque: tuple[OpaqueGroup, ...]
    temporaries: Mapping[str, int]

    @property
    def inputs(self) -> frozenset[str]:
        """HF tensors that this rank uses."""
        return frozenset(name for unit in self.units for name in unit.inputs) | {name for group in self.opaque for name in group.inputs}

    @property
    def written(self) -> int:
        """Planned bytes on the wire for one target."""
        return self.written_by((*self.units, *self.opaque))

    def written_by(self, pieces: Iterable[Unit | OpaqueGroup]) -> int:
        """Bytes on the wire of some pieces."""
        return sum(
            piece.written if isinstance(piece, Unit) else sum(self.parameters[name].nbytes for name in piece.parameters) for piece in pieces
        )

    def largest_packed(self) -> int:
        """Bytes of the largest piece that must lie in one staging slot if nothing could go directly."""
        sizes = [unit.nbytes for unit in self.units]
        sizes += [self.parameters[name].nbytes for group in self.opaque for name in group.parameters]
        return max(sizes, default=0)

    def digest(self) -> str:
        """SHA-256 of the program's text: equal programs move the same bytes."""
        text = repr((sorted(self.parameters.items()), self.units, self.opaque))
        return hashlib.sha256(text.encode()).hexdigest()


def compile_program(trace: Trace, parameters: Mapping[str, TensorSpec]) -> Program:
    """Turn a trace into units.

    Steps into one parameter whose spans overlap stay together and in order; all others stand alone. Chains through
    temporaries are resolved to the HF tensor where both sides are plain runs, and replayed otherwise.
    """
    opaque = _opaque_groups(trace)
    skipped = {name for group in opaque for name in group.parameters}
    fills: dict[str, list[_Placed]] = defaultdict(list)
    into_temporary: dict[str, list[Step]] = defaultdict(list)
    for step in trace.steps:
        if step.target.kind is Kind.TEMPORARY:
            into_temporary[step.target.name].append(step)
        elif step.target.name not in skipped and step.target_view.count:
            for resolved in _resolve(step, into_temporary):
                fills[step.target.name].append(_Placed(resolved, _chain(resolved, into_temporary)))
    units = [_unit(name, cluster) for name, placed in fills.items() for cluster in _clusters(placed)]
    return Program(dict(parameters), tuple(units), tuple(opaque), dict(trace.temporaries))


class _Placed(NamedTuple):
    """A step into a parameter, and the steps through temporaries that had run before it and that it needs."""

    step: Step
    chain: tuple[Step, ...]


def _opaque_groups(trace: Trace) -> list[OpaqueGroup]:
    """Join opaque parameters that share HF tensors, and take along all that flows into them."""
    feeds: dict[str, set[str]] = {name: set(origins) for name, origins in trace.opaque.items()}
    groups: list[tuple[set[str], set[str]]] = []
    for name, origins in feeds.items():
        parameters, inputs = {name}, set(origins)
        rest = []
        for group in groups:
            if group[1] & inputs:
                parameters |= group[0]
                inputs |= group[1]
            else:
                rest.append(group)
        groups = [*rest, (parameters, inputs)]
    return [OpaqueGroup(tuple(sorted(parameters)), tuple(sorted(inputs)), trace.reasons[min(parameters)]) for parameters, inputs in groups]


def _resolve(step: Step, into_temporary: Mapping[str, Sequence[Step]], depth: int = 0) -> list[Step]:
    """Replace a read of a temporary by reads of what was put there, where runs map onto runs."""
    if isinstance(step, Fill) or step.source.kind is not Kind.TEMPORARY or depth > 8:
        return [step]
    view = step.source_view
    if not (view.contiguous and step.target_view.contiguous and view.dtype == step.target_view.dtype):
        return [step]
    start, length = view.span
    resolved: list[Step] = []
    for put in into_temporary[step.source.name]:
        at, size = put.target_view.span
        if at + size <= start or start + length <= at:
            continue
        inside = start <= at and at + size <= start + length
        if not put.target_view.contiguous or put.target_view.dtype != view.dtype or not inside:
            return [step]
        placed = put.target_view.shifted(step.target_view.offset - start)
        moved = Fill(step.target, placed, put.value) if isinstance(put, Fill) else Copy(step.target, placed, put.source, put.source_view)
        resolved.extend(_resolve(moved, into_temporary, depth + 1))
    if missing_runs(covered_runs(s.target_view.shifted(-step.target_view.offset) for s in resolved), length):
        return [step]
    return resolved


def _clusters(placed: Sequence[_Placed]) -> list[list[_Placed]]:
    """Group steps whose target spans overlap, each group in its original order."""
    order = sorted(range(len(placed)), key=lambda index: placed[index].step.target_view.span)
    clusters: list[list[int]] = []
    end = -1
    for index in order:
        start, length = placed[index].step.target_view.span
        if start < end:
            clusters[-1].append(index)
        else:
            clusters.append([index])
        end = max(end, start + length)
    return [[placed[index] for index in sorted(cluster)] for cluster in clusters]


def _unit(parameter: str, placed: Sequence[_Placed]) -> Unit:
    spans = [item.step.target_view.span for item in placed]
    low, high = min(start for start, _ in spans), max(start + length for start, length in spans)
    steps = tuple(dict.fromkeys(step for item in placed for step in (*item.chain, item.step)))
    inputs = {step.source.name for step in steps if isinstance(step, Copy) and step.source.kind is Kind.HF}
    direct = None
    if len(steps) == 1 and isinstance(steps[0], Copy) and steps[0].source.kind is Kind.HF:
        only = steps[0]
        if only.target_view.contiguous and only.source_view.contiguous and only.target_view.dtype == only.source_view.dtype:
            direct = (only.source.name, only.source_view.offset)
    return Unit(
        parameter=parameter,
        offset=low,
        nbytes=high - low,
        steps=steps,
        inputs=tuple(sorted(inputs)),
        runs=covered_runs(item.step.target_view for item in placed),
        direct=direct,
    )


def _chain(step: Step, into_temporary: Mapping[str, Sequence[Step]]) -> tuple[Step, ...]:
    """Steps that fill the temporaries which ``step`` reads, those needed first first."""
    if isinstance(step, Fill) or step.source.kind is not Kind.TEMPORARY:
        return ()
    chain: list[Step] = []
    for put in into_temporary[step.source.name]:
        chain.extend(_chain(put, into_temporary))
        chain.append(put)
    return tuple(chain)


# Coverage: does every byte of every parameter get filled, and does every byte of every HF tensor go somewhere?


def unfilled(program: Program) -> dict[str, tuple[Run, ...]]:
    """Parameters with bytes that no unit writes, and which; whole parameters as one run."""
    runs: dict[str, list[Run]] = defaultdict(list)
    for unit in program.units:
        runs[unit.parameter].extend(unit.runs)
    opaque = {name for group in program.opaque for name in group.parameters}
    holes = {}
    for name, spec in program.parameters.items():
        if name not in opaque:
            missing = missing_runs(merge_runs(runs[name]), spec.nbytes)
            if missing:
                holes[name] = missing
    return holes


def unread(programs: Iterable[Program], tensors: Mapping[str, TensorSpec]) -> dict[str, tuple[Run, ...]]:
    """HF tensors with bytes that no rank of an engine takes, and which."""
    views: dict[str, list[View]] = defaultdict(list)
    whole: set[str] = set()
    for program in programs:
        for group in program.opaque:
            whole.update(group.inputs)
        for unit in program.units:
            for step in unit.steps:
                if isinstance(step, Copy) and step.source.kind is Kind.HF:
                    views[step.source.name].append(step.source_view)
    left = {}
    for name, spec in tensors.items():
        if name not in whole:
            missing = missing_runs(covered_runs(set(views[name])), spec.nbytes)
            if missing:
                left[name] = missing
    return left


_LOSSLESS = {("bfloat16", "float32"), ("float16", "float32"), ("float32", "float64"), ("bfloat16", "float64"), ("float16", "float64")}


def lossy_casts(program: Program) -> dict[str, tuple[str, str, str]]:
    """HF tensors whose values would be rounded on their way: name -> (parameter, dtype before, dtype after)."""
    found = {}
    for unit in program.units:
        for step in unit.steps:
            if isinstance(step, Copy):
                came, goes = step.source_view.dtype, step.target_view.dtype
                if came != goes and (came, goes) not in _LOSSLESS:
                    # Through a temporary, any of the unit's tensors may be the one.
                    names = (step.source.name,) if step.source.kind is Kind.HF else unit.inputs
                    found.update(dict.fromkeys(names, (unit.parameter, came, goes)))
    return found


def guess_missing_tensors(hole: str, program: Program, known: Iterable[str]) -> list[str]:
    """HF names that would fill ``hole``, guessed from how its sisters (same name, other numbers) are filled.

    Only for messages. Empty where no sister is filled from named tensors that follow the same numbering.
    """
    names = set(known)
    guesses: dict[str, None] = {}
    own: dict[str, set[tuple[str, ...]]] = defaultdict(set)
    for unit in program.units:
        numbers = _sister(unit.parameter, hole)
        if numbers is None:
            continue
        for name in unit.inputs:
            parts = re.split(r"(\d+)", name)
            if unit.parameter == hole:
                own["\0".join(parts[::2])].add(tuple(parts[1::2]))
            elif (guess := _renumbered(name, numbers)) not in names:
                guesses.setdefault(guess)
    numberings = set().union(*own.values()) if own else set()
    for template, seen in own.items():
        pieces = template.split("\0")
        for numbering in sorted(numberings - seen):
            if len(numbering) == len(pieces) - 1:
                guess = "".join(text + number for text, number in zip(pieces, (*numbering, ""), strict=True))
                if guess not in names:
                    guesses.setdefault(guess)
    return list(guesses)


def _sister(name: str, other: str) -> list[tuple[str, str]] | None:
    """How to renumber ``name`` to get ``other``, or None where they differ in more than numbers."""
    left, right = re.split(r"(\d+)", name), re.split(r"(\d+)", other)
    if len(left) != len(right) or left[::2] != right[::2]:
        return None
    return list(zip(left[1::2], right[1::2], strict=True))


def _renumbered(name: str, numbers: Sequence[tuple[str, str]]) -> str:
    parts = re.split(r"(\d+)", name)
    for index, (old, new) in enumerate(numbers):
        at = 2 * index + 1
        if at < len(parts) and parts[at] == old:
            parts[at] = new
    return "".join(parts)


def require_complete(
    programs: Mapping[str, Program],
    tensors: Mapping[str, TensorSpec],
    *,
    constants: Mapping[str, Mapping[str, tuple[Run, ...]]],
    exempt: Mapping[str, frozenset[str]],
    allow_unused: Sequence[re.Pattern[str]],
    allow_cast: bool,
) -> tuple[str, ...]:
    """Prove, before the first byte, that the HF tensors fill every rank of an engine and that none is left over.

    Args:
        programs: by a label of the rank for messages.
        constants: by the same labels, bytes of parameters that the loader fills with a constant and that are no padding.
        exempt: by the same labels, parameters that need not be filled: KV cache scales, which no checkpoint has, and what a
            draft shares with its target.
        allow_unused: patterns of HF names that may go nowhere.

    Returns:
        HF names that were left over and allowed.

    Raises:
        SourceError: naming what is missing, left over, or would be rounded.
    """
    problems: list[str] = []
    names: list[str] = []
    for label, program in programs.items():
        holes = {name: runs for name, runs in unfilled(program).items() if name not in exempt[label]}
        for name, runs in list(holes.items())[:20]:
            guesses = guess_missing_tensors(name, program, tensors)
            hint = f"; missing HF tensor {listing(guesses)}" if guesses else ""
            problems.append(f"{label}: parameter {name} stays unfilled in {_say(runs, program.parameters[name].nbytes)}{hint}")
            names += [name, *guesses]
        for name, runs in list(constants[label].items())[:20]:
            feeding = sorted({i for p in programs.values() for unit in p.units if unit.parameter == name for i in unit.inputs})
            shapes = listing((f"{i} {list(tensors[i].shape)}" for i in feeding), 6) or "no tensor"
            problems.append(
                f"{label}: parameter {name} would be padded by the loader in {_say(runs, program.parameters[name].nbytes)}, so "
                f"what feeds it is too small: {shapes}"
            )
            names += [name, *feeding]
        if not allow_cast:
            for name, (parameter, came, goes) in list(lossy_casts(program).items())[:20]:
                problems.append(f"{label}: HF tensor {name} would be rounded from {came} to {goes} on its way into parameter {parameter}")
                names.append(name)
    left = unread(programs.values(), tensors)
    refused = {name: runs for name, runs in left.items() if not any(pattern.search(name) for pattern in allow_unused)}
    for name, runs in list(refused.items())[:20]:
        problems.append(f"HF tensor {name} is not used by any rank in {_say(runs, tensors[name].nbytes)}")
        names.append(name)
    if problems:
        raise SourceError(
            f"the tensors do not fill the engine exactly, nothing was written: {listing(dict.fromkeys(problems))}. Expected every "
            "parameter filled and every tensor used, in the engine's dtypes; send the tensors under their Hugging Face names, or "
            "allow tensors that the engine does not hold (allow_unused) and rounding (allow_cast)",
            names=dict.fromkeys(names),
        )
    return tuple(left)


def _say(runs: Sequence[Run], nbytes: int) -> str:
    if runs == ((0, nbytes),):
        return f"all {nbytes} bytes"
    shown = ", ".join(f"{start}..{start + length}" for start, length in runs[:4])
    return f"bytes {shown}{' and more' if len(runs) > 4 else ''} of {nbytes}"
