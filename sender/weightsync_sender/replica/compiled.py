"""Compiled replicas: one per (layout, role, rank, set of HF tensors), kept for the life of the sender.

``compile_engine`` is what the rest of the sender uses of this package: from an engine's tables and a manifest to one
proven program per target, or an error before anything was written.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from weightsync_core.errors import LayoutError
from weightsync_core.tables import TARGET, ParameterTable, Placement
from weightsync_sender.replica.execute import check_program, constant_runs
from weightsync_sender.replica.layout import Layout, read_config
from weightsync_sender.replica.model import ReplicaModel, build_replica, require_same_table
from weightsync_sender.replica.program import Program, TensorSpec, compile_program, require_complete
from weightsync_sender.replica.trace import ValueReadError, trace_loading
from weightsync_sender.replica.views import Run
from weightsync_sender.sources import TensorMeta


@dataclass(frozen=True)
class CompiledRank:
    """A replica and the program that fills it; shared by all targets of equal layout, role and rank."""

    replica: ReplicaModel
    program: Program
    key: str
    """Equal keys move equal bytes."""
    constants: Mapping[str, tuple[Run, ...]] = field(default_factory=dict)
    """Bytes that the loader fills with a constant."""


class ReplicaStore:
    """Builds and keeps compiled replicas."""

    def __init__(self, check_device: torch.device) -> None:
        self._check_device = check_device
        self._replicas: dict[tuple[str, str, int], ReplicaModel] = {}
        self._checked: set[str] = set()
        self._compiled: dict[tuple[str, str, int, str], CompiledRank] = {}

    def compile_engine(
        self,
        layout: Layout,
        tables: Sequence[ParameterTable],
        manifest: Mapping[str, TensorMeta],
        *,
        allow_unused: Sequence[str],
        allow_cast: bool,
    ) -> tuple[dict[tuple[str, int], CompiledRank], tuple[str, ...]]:
        """One compiled rank per target of an engine, keyed by (role, rank), and the HF tensors left over.

        Raises:
            LayoutError: the replica cannot be built or differs from a table.
            SourceError: the tensors do not fill the engine exactly.
        """
        specs = {name: _spec(meta) for name, meta in manifest.items()}
        compiled = self._compile(layout, tables, specs)
        patterns = [re.compile(pattern) for pattern in (*allow_unused, *_known_unused(layout))]
        left = require_complete(
            {f"{role} rank {rank}": item.program for (role, rank), item in compiled.items()},
            specs,
            constants={
                f"{role} rank {rank}": {name: runs for name, runs in item.constants.items() if name not in item.replica.padded}
                for (role, rank), item in compiled.items()
            },
            exempt={
                f"{table.role} rank {table.placement.rank}": compiled[table.role, table.placement.rank].replica.engine_only
                | _shared_with_target(table, tables)
                for table in tables
            },
            allow_unused=patterns,
            allow_cast=allow_cast,
        )
        self._check(compiled.values(), specs)
        return compiled, left

    def compile_ranks(
        self, layout: Layout, tables: Sequence[ParameterTable], manifest: Mapping[str, TensorMeta]
    ) -> dict[tuple[str, int], CompiledRank]:
        """Some targets' compiled ranks; that nothing is missing is proven where all are compiled.

        Raises:
            LayoutError: the replica cannot be built or differs from a table.
        """
        specs = {name: _spec(meta) for name, meta in manifest.items()}
        compiled = self._compile(layout, tables, specs)
        self._check(compiled.values(), specs)
        return compiled

    def _compile(
        self, layout: Layout, tables: Sequence[ParameterTable], specs: Mapping[str, TensorSpec]
    ) -> dict[tuple[str, int], CompiledRank]:
        compiled = {}
        for table in tables:
            rank = self._compile_rank(layout, table.placement, table.role, specs)
            require_same_table(rank.replica, table)
            compiled[table.role, table.placement.rank] = rank
        return compiled

    def _check(self, ranks: Iterable[CompiledRank], specs: Mapping[str, TensorSpec]) -> None:
        """The byte check of what was not checked yet."""
        for rank in ranks:
            if rank.key not in self._checked:
                check_program(rank.replica, rank.program, specs, self._check_device)
                self._checked.add(rank.key)

    def _compile_rank(self, layout: Layout, placement: Placement, role: str, specs: Mapping[str, TensorSpec]) -> CompiledRank:
        """The program of one rank for one set of HF tensors; built and traced on first use."""
        key = (layout.key, role, placement.tp_rank)
        digest = hashlib.sha256(repr(sorted(specs.items())).encode()).hexdigest()
        if (*key, digest) not in self._compiled:
            if key not in self._replicas:
                self._replicas[key] = build_replica(layout, placement, role)
            replica = self._replicas[key]
            program = _trace(replica, specs)
            name = "/".join(map(str, (*key, digest)))
            self._compiled[*key, digest] = CompiledRank(replica, program, name, constant_runs(program, specs))
        return self._compiled[*key, digest]


def _trace(replica: ReplicaModel, specs: Mapping[str, TensorSpec]) -> Program:
    read: set[str] = set()
    while True:
        tensors = {name: _stand_in(spec, real=name in read) for name, spec in specs.items()}
        try:
            trace = trace_loading(replica.parameters, replica.others, tensors, replica.load, value_dependent=read)
        except ValueReadError as error:
            if error.name in read:
                raise LayoutError(f"load_weights of {replica.role} cannot be traced at HF tensor {error.name!r}: {error}") from error
            read.add(error.name)
            continue
        return compile_program(trace, replica.specs)


def _stand_in(spec: TensorSpec, *, real: bool) -> torch.Tensor:
    dtype = getattr(torch, spec.dtype)
    return torch.zeros(spec.shape, dtype=dtype) if real else torch.empty(spec.shape, dtype=dtype, device="meta")


def _spec(meta: TensorMeta) -> TensorSpec:
    return TensorSpec(meta.shape, str(meta.dtype).removeprefix("torch."), meta.dtype.itemsize)


def _shared_with_target(table: ParameterTable, tables: Sequence[ParameterTable]) -> frozenset[str]:
    """Parameters of a draft that lie where the target's do (embedding and head): filled with the target."""
    if table.role == TARGET:
        return frozenset()
    target = next((other for other in tables if other.role == TARGET and other.placement.rank == table.placement.rank), None)
    places = {(entry.address, entry.nbytes) for entry in target.entries.values()} if target is not None else set()
    return frozenset(name for name, entry in table.entries.items() if (entry.address, entry.nbytes) in places)


def _known_unused(layout: Layout) -> list[str]:
    """HF tensors that checkpoints carry and engines rightly leave out."""
    config = read_config(layout.config_dir)
    patterns = [r"rotary_emb\.inv_freq$"]
    if config.get("tie_word_embeddings"):
        patterns.append(r"^lm_head\.weight$")
    first = config.get("num_hidden_layers")
    predicted = [first + number for number in range(config.get("num_nextn_predict_layers") or 0)] if isinstance(first, int) else []
    # Prediction layers carry copies of embedding and head, which engines take from the target.
    patterns.extend(rf"^model\.layers\.{layer}\.(embed_tokens|shared_head\.head)\.weight$" for layer in predicted)
    if not layout.speculative:  # multi-token prediction layers, which only a draft holds
        patterns.append(r"(^|\.)mtp(_layers)?\.")
        patterns.extend(rf"^model\.layers\.{layer}\." for layer in predicted)
    return patterns
