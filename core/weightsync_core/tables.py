"""What an engine publishes about itself, read from JSON and checked.

In: the answers of the plugin's live call, or stock sglang's ``/remote_instance_transfer_engine_info``. Out: frozen
values. A value that breaks its schema is a ``DocumentError`` that names the field; nothing is guessed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from weightsync_core.errors import DocumentError, listing

TARGET, DRAFT = "target", "draft"


@dataclass(frozen=True)
class TensorEntry:
    """One parameter in an engine rank's memory."""

    name: str
    address: int
    """Virtual address in the engine process (device memory on a GPU)."""
    nbytes: int
    item_size: int
    """Bytes of one element."""
    dtype: str | None = None
    """As ``torch.bfloat16`` without the prefix; None where a stock engine does not say."""
    shape: tuple[int, ...] | None = None
    stride: tuple[int, ...] | None = None
    """In elements."""


@dataclass(frozen=True)
class Placement:
    """Where one engine rank stands in the engine's parallel layout."""

    rank: int
    """Rank within the engine, over all its nodes."""
    tp_rank: int
    tp_size: int
    pp_rank: int = 0
    pp_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1


@dataclass(frozen=True)
class Session:
    """How one engine rank's memory is reached over one transport."""

    transport: str
    memory: str
    """``cpu`` or ``cuda``."""
    device: int
    """Device index in the engine process, 0 for host memory."""
    address: str = ""
    """Mooncake: host:port of the peer's transfer engine."""
    agent: str = ""
    """NIXL: name of the peer's agent."""
    metadata: str = ""
    """NIXL: the peer's metadata, base64."""
    detail: str = ""
    """Protocol or backend, as the engine was told (``tcp``, ``rdma``, ``UCX``)."""


@dataclass(frozen=True)
class Identity:
    """The build that an engine rank runs; both ends must agree on it."""

    sglang: str
    torch: str = ""
    arch: str = ""
    """``cpu``, or the CUDA compute capability as ``sm_90``; empty where a stock engine does not say."""


@dataclass(frozen=True)
class ParameterTable:
    """Everything needed to write one (engine rank, role)."""

    role: str
    placement: Placement
    generation: str
    """Random, drawn at process start, changed whenever the memory behind the addresses may have changed."""
    identity: Identity
    entries: Mapping[str, TensorEntry]
    sessions: Mapping[str, Session]
    """By transport."""
    refusal: str = ""
    """Why this rank must not be written, in the engine's own words."""
    open_session: bool = False
    """Whether a weight-update session is open on this rank."""
    unavailable: Mapping[str, str] = field(default_factory=dict)
    """Transports that the engine was asked to publish but could not, with the reason."""

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters."""
        return sum(entry.nbytes for entry in self.entries.values())

    @property
    def label(self) -> str:
        """``target rank 3`` for messages."""
        return f"{self.role} rank {self.placement.rank}"


def parse_table(document: Mapping[str, Any]) -> ParameterTable:
    """Read one table of the plugin's live call.

    Raises:
        DocumentError: a field is missing or of another type than stated.
    """
    try:
        entries = {
            name: TensorEntry(
                name=name,
                address=_whole(row[0], name),
                nbytes=_whole(row[1], name),
                item_size=_whole(row[2], name),
                dtype=str(row[3]),
                shape=tuple(_whole(size, name) for size in row[4]),
                stride=tuple(_whole(step, name) for step in row[5]),
            )
            for name, row in document["parameters"].items()
        }
        sessions = {key: Session(transport=key, **value) for key, value in document["sessions"].items()}
        table = ParameterTable(
            role=document["role"],
            placement=Placement(**document["placement"]),
            generation=document["generation"],
            identity=Identity(**document["identity"]),
            entries=entries,
            sessions=sessions,
            refusal=document["refusal"],
            open_session=document["open_session"],
            unavailable=dict(document["unavailable"]),
        )
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise DocumentError(
            f"cannot read a published parameter table: {type(error).__name__}: {error}; sender and engine plugin "
            "must be of the same p2p-weightsync version"
        ) from error
    wrong = [
        f"{e.name} ({e.nbytes} bytes for shape {list(e.shape or ())} of {e.item_size}-byte {e.dtype})"
        for e in table.entries.values()
        if e.shape is not None and e.nbytes != e.item_size * _product(e.shape)
    ]
    if wrong:
        raise DocumentError(f"{table.label} publishes sizes that contradict their shapes: {listing(wrong)}")
    return table


def parse_stock_table(
    rows: Mapping[str, Any], placement: Placement, session: Session, identity: Identity, generation: str
) -> ParameterTable:
    """Read stock sglang's table, ``{name: [address, elements, element size]}``; shapes and dtypes stay unknown.

    Raises:
        DocumentError: a row of another form.
    """
    entries = {}
    for name, row in rows.items():
        if not isinstance(row, (list, tuple)) or len(row) != 3:
            raise DocumentError(f"stock table row of {name!r} is {row!r}; expected [address, elements, element size]")
        address, count, item = (_whole(value, name) for value in row)
        entries[name] = TensorEntry(name, address, count * item, item)
    return ParameterTable(
        role=TARGET, placement=placement, generation=generation, identity=identity, entries=entries, sessions={session.transport: session}
    )


def _whole(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise DocumentError(f"parameter {name!r} publishes {value!r} where a whole number was expected")
    return value


def _product(sizes: tuple[int, ...]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total
