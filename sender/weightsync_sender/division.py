"""Who writes what: source groups, and the writers of one update. Pure functions, equal on all trainer ranks.

A source group is the trainer ranks that hand out the same Hugging Face tensors: a pipeline stage, or all ranks. Every piece of a
program belongs to the first group that has all its tensors, and every target has one writer in each group.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from weightsync_core.errors import SourceError, listing
from weightsync_core.planner import PlanTarget, TargetId, TrainerRank, plan
from weightsync_core.tables import ParameterTable
from weightsync_sender.replica.program import OpaqueGroup, Program, Unit
from weightsync_sender.sources import TensorMeta

Manifest = Mapping[str, TensorMeta]
Writers = Mapping[tuple[str, TargetId], int]
"""(source group, target) -> trainer rank."""


@dataclass(frozen=True)
class Member:
    """What one trainer rank says of itself at the start of an update."""

    version: str
    engines: tuple[str, ...]
    group: str
    """Its source group; "" where all ranks are one."""
    node: str
    """Ranks of one node share its network cards."""
    digest: str
    """Of its manifest."""


@dataclass(frozen=True)
class Division:
    """Source groups and what each hands out."""

    members: tuple[Member, ...]
    manifests: Mapping[str, Manifest]
    """By source group, in the order of their first ranks."""
    union: Manifest
    _groups_of: Mapping[str, frozenset[str]] = field(repr=False)

    def pieces(self, program: Program, group: str) -> tuple[Unit | OpaqueGroup, ...]:
        """What a source group brings of a program.

        Raises:
            SourceError: a piece takes tensors that no group has all of.
        """
        everything: tuple[Unit | OpaqueGroup, ...] = (*program.units, *program.opaque)
        if len(self.manifests) == 1:
            return everything
        return tuple(piece for piece in everything if self._owner(piece) == group)

    def _owner(self, piece: Unit | OpaqueGroup) -> str:
        able = set(self.manifests)
        for name in piece.inputs:
            able &= self._groups_of[name]
        if not able:
            what = piece.parameter if isinstance(piece, Unit) else listing(piece.parameters)
            raise SourceError(
                f"parameter {what} takes tensors that no source group has all of: {listing(piece.inputs)}; let one pipeline stage hand "
                "out all of them",
                names=piece.inputs,
            )
        return next(group for group in self.manifests if group in able)


def digest_of(manifest: Manifest) -> str:
    """Equal manifests have equal digests."""
    return hashlib.sha256(repr(sorted((name, meta.shape, str(meta.dtype)) for name, meta in manifest.items())).encode()).hexdigest()


def require_agreement(members: Sequence[Member]) -> None:
    """Prove that all ranks mean the same update.

    Raises:
        SourceError: other versions, or ranks of one source group that hand out other tensors.
    """
    versions = sorted({member.version for member in members})
    if len(versions) > 1:
        raise SourceError(f"trainer ranks bring different versions: {listing(versions)}; all must call update with the same")
    for rank, member in enumerate(members):
        if member.engines != members[0].engines:
            raise SourceError(
                f"trainer rank {rank} is to update {listing(member.engines)}, rank 0 {listing(members[0].engines)}: "
                "all need the same engines"
            )
    for group, ranks in _ranks_by_group(members).items():
        odd = [rank for rank in ranks if members[rank].digest != members[ranks[0]].digest]
        if odd:
            raise SourceError(
                f"trainer ranks {listing(map(str, odd))} hand out other tensors than rank {ranks[0]}, although both are of source group "
                f"{group!r}; give ranks that hold different tensors different groups"
            )


def divide(members: Sequence[Member], manifests: Mapping[str, Manifest]) -> Division:
    """Join what the groups hand out.

    Raises:
        SourceError: two groups have one tensor in different shapes or dtypes.
    """
    union: dict[str, TensorMeta] = {}
    groups_of: dict[str, set[str]] = defaultdict(set)
    for group, manifest in manifests.items():
        for name, meta in manifest.items():
            known = union.setdefault(name, meta)
            if known != meta:
                raise SourceError(
                    f"source group {group!r} hands out {name!r} as {list(meta.shape)} {meta.dtype}, another one as {list(known.shape)} "
                    f"{known.dtype}",
                    names=[name],
                )
            groups_of[name].add(group)
    return Division(tuple(members), dict(manifests), union, {name: frozenset(groups) for name, groups in groups_of.items()})


def groups(members: Sequence[Member]) -> dict[str, int]:
    """Source groups and the first rank of each."""
    return {group: ranks[0] for group, ranks in _ranks_by_group(members).items()}


def choose_writers(division: Division, engines: Iterable[tuple[str, str, Sequence[ParameterTable]]], previous: Writers) -> Writers:
    """Who writes which target, in every source group.

    Args:
        engines: (name, layout, tables) of each.
        previous: of the last update; kept where that costs nothing.
    """
    targets = [
        PlanTarget(TargetId(name, table.role, table.placement.rank), table.nbytes, f"{layout}/{table.role}/{table.placement.tp_rank}")
        for name, layout, tables in engines
        for table in tables
    ]
    writers: dict[tuple[str, TargetId], int] = {}
    for group, ranks in _ranks_by_group(division.members).items():
        trainers = [TrainerRank(rank, division.members[rank].node) for rank in ranks]
        former = {target: rank for (other, target), rank in previous.items() if other == group}
        chosen = plan(trainers, targets, previous=former)
        writers.update({(group, target): rank for target, rank in chosen.writers.items()})
    return writers


def _ranks_by_group(members: Sequence[Member]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = defaultdict(list)
    for rank, member in enumerate(members):
        found[member.group].append(rank)
    return dict(found)
