"""Proofs that an engine holds what was meant, beyond the transport's word.

- digest: raw bytes of every parameter, summed up while they were produced here and on the engine's device there;
- sglang's own checksums, for engines without the plugin: the replica's parameters are made here once more and hashed
  with sglang's functions;
- snapshot: sglang's ``/weights_checker``, see :class:`weightsync_sender.settings.Verify`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from weightsync_core.digest import common_ranges, digest_text
from weightsync_core.errors import ControlCallError, VerificationError, listing
from weightsync_core.tables import TARGET, ParameterTable
from weightsync_sender.engine_client import Deadline, EngineClient
from weightsync_sender.replica.checksums import checksums_of
from weightsync_sender.replica.compiled import CompiledRank
from weightsync_sender.replica.execute import run_opaque, run_unit
from weightsync_sender.replica.program import Program, Unit


def written_ranges(program: Program) -> dict[str, list[tuple[int, int]]]:
    """Byte ranges of each parameter that an update writes."""
    runs: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for unit in program.units:
        runs[unit.parameter].extend(unit.runs)
    for group in program.opaque:
        for name in group.parameters:
            runs[name] = [(0, program.parameters[name].nbytes)]
    return {name: common_ranges(ranges) for name, ranges in runs.items()}


def verify_digests(
    client: EngineClient,
    tables: Sequence[ParameterTable],
    ranks: Mapping[tuple[str, int], CompiledRank],
    sums: Mapping[str, Mapping[str, Sequence[int]]],
    deadline: Deadline,
) -> None:
    """Compare raw byte digests of every target of one engine.

    Args:
        sums: by compiled key and parameter, as the stream summed them up.

    Raises:
        VerificationError: naming rank and parameters that differ.
    """
    wanted: dict[str, dict[str, Any]] = {}
    for table in tables:
        program = ranks[table.role, table.placement.rank].program
        place = table.placement
        wanted[f"{table.role}/{place.dp_rank}/{place.tp_rank}"] = {
            name: None if ranges == [(0, program.parameters[name].nbytes)] else ranges for name, ranges in written_ranges(program).items()
        }
    answers = client.digests(wanted, deadline)
    _require_all_ranks(client, tables, len(answers), "digests")
    wrong = []
    for table in tables:
        answer = answers[_answer_index(table, tables)]
        key = ranks[table.role, table.placement.rank].key
        prefix = "" if table.role == TARGET else f"{table.role}."
        for name, (first, second, covered) in sums[key].items():
            expected = digest_text((first, second, covered))
            seen = answer.get(prefix + name)
            if seen != expected:
                wrong.append(f"{table.label} {name} ({seen}, expected {expected})")
    if wrong:
        raise VerificationError(f"{client.endpoint} holds other bytes than were written: {listing(wrong)}")


def _require_all_ranks(client: EngineClient, tables: Sequence[ParameterTable], answers: int, what: str) -> None:
    expected = len({table.placement.rank for table in tables})
    if answers != expected:
        raise VerificationError(f"{client.endpoint} sent {what} of {answers} ranks, expected {expected}: nothing is proven")


def _answer_index(table: ParameterTable, tables: Sequence[ParameterTable]) -> int:
    """Answers come one per rank, in the order of data-parallel replicas and their ranks."""
    ranks = sorted({other.placement.rank for other in tables})
    return ranks.index(table.placement.rank)


def verify_checksums(
    client: EngineClient,
    tables: Sequence[ParameterTable],
    ranks: Mapping[tuple[str, int], CompiledRank],
    tensors: Iterable[tuple[str, torch.Tensor]],
    device: torch.device,
    deadline: Deadline,
) -> None:
    """Compare sglang's own checksums of a stock engine with those of the same parameters made here.

    Args:
        tensors: a second pass over the source.

    Raises:
        VerificationError: naming rank and parameters that differ.
    """
    expected = _make_checksums([ranks[table.role, table.placement.rank] for table in tables], tensors, device)
    answers = client.checksums(deadline)
    _require_all_ranks(client, tables, len(answers), "checksums")
    wrong = []
    for table in tables:
        answer = answers[_answer_index(table, tables)]
        for name, value in expected[ranks[table.role, table.placement.rank].key].items():
            seen = answer.get(name)
            if seen != value:
                wrong.append(f"{table.label} {name} ({seen}, expected {value})")
    if wrong:
        raise VerificationError(f"{client.endpoint} holds other values than were written: {listing(wrong)}")


def _make_checksums(
    ranks: Iterable[CompiledRank], tensors: Iterable[tuple[str, torch.Tensor]], device: torch.device
) -> dict[str, dict[str, str]]:
    """Checksums by compiled key and parameter; whole parameters only, one batch of weights and scales at a time."""
    distinct = {rank.key: rank for rank in ranks}
    makers = {key: _ParameterMaker(rank, device) for key, rank in distinct.items()}
    for name, tensor in tensors:
        for maker in makers.values():
            maker.arrived(name, tensor.contiguous())
    return {key: checksums_of(distinct[key].replica, maker.made) for key, maker in makers.items()}


class _ParameterMaker:
    """Fills parameters of one rank as their HF tensors come in."""

    def __init__(self, rank: CompiledRank, device: torch.device) -> None:
        self.made: dict[str, torch.Tensor] = {}
        self._rank, self._device = rank, device
        self._held: dict[str, torch.Tensor] = {}
        self._units: dict[str, list[Unit]] = defaultdict(list)
        for unit in rank.program.units:
            self._units[unit.parameter].append(unit)
        self._missing = {name: {i for unit in units for i in unit.inputs} for name, units in self._units.items()}
        self._groups = {group: set(group.inputs) for group in rank.program.opaque}

    def arrived(self, name: str, tensor: torch.Tensor) -> None:
        self._held[name] = tensor
        for parameter, missing in list(self._missing.items()):
            missing.discard(name)
            if not missing:
                del self._missing[parameter]
                self._make(parameter)
        for group, missing in list(self._groups.items()):
            missing.discard(name)
            if not missing:
                del self._groups[group]
                outs = {item: self._empty(item) for item in group.parameters}
                run_opaque(self._rank.replica, group, self._held, outs)
                self.made.update(outs)

    def _make(self, parameter: str) -> None:
        out = self._empty(parameter)
        for unit in self._units[parameter]:
            piece = torch.empty(unit.nbytes, dtype=torch.uint8, device=self._device)
            run_unit(unit, self._held, piece, self._rank.program.temporaries)
            for start, length in unit.runs:
                out[start : start + length] = piece[start - unit.offset : start - unit.offset + length]
        self.made[parameter] = out

    def _empty(self, parameter: str) -> torch.Tensor:
        return torch.zeros(self._rank.program.parameters[parameter].nbytes, dtype=torch.uint8, device=self._device)


def compare_with_snapshot(client: EngineClient, ranks: Mapping[tuple[str, int], CompiledRank], deadline: Deadline) -> None:
    """Have sglang compare what it holds with its snapshot.

    Raises:
        VerificationError: it differs, or holds NaN, which equals nothing.
    """
    try:
        client.check_weights("compare", deadline, snapshot_exclusions(ranks.values()))
    except ControlCallError as error:
        if error.status is None:
            raise
        hint = "; weights with NaN cannot be compared this way, verify them by digest" if "nan" in error.body else ""
        raise VerificationError(f"{client.endpoint} differs from its snapshot: {error.body}{hint}") from error


def snapshot_exclusions(ranks: Iterable[CompiledRank]) -> list[str]:
    """Names that sglang must neither randomise nor compare: what no update writes and nothing recomputes."""
    names: dict[str, None] = {}
    for rank in ranks:
        names.update(dict.fromkeys(rank.replica.engine_only))
        names.update(dict.fromkeys(name for name in rank.replica.buffer_names if not name.endswith("gemma_weight")))
    return list(names)
