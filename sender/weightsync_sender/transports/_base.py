"""The protocol of a transport.

Memory is registered once and written from many times. A connection reaches one engine rank. ``post`` returns at once;
a ``Write`` is polled until it is no longer pending, and only then may its source memory change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

from weightsync_core.tables import Session


@dataclass(frozen=True, slots=True)
class Memory:
    """Where local bytes lie: ``device`` is a CUDA index, None for host memory."""

    device: int | None = None


class Piece(NamedTuple):
    """One run of bytes to be written."""

    source: int
    """Local address."""
    target: int
    """Address in the engine's process."""
    length: int


class WriteState(Enum):
    """What is known of a posted write."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


class Write(Protocol):
    """One posted batch."""

    error: str

    def poll(self) -> WriteState:
        """The state now; makes progress where the library needs it. Frees the library's handle when over."""


class Connection(Protocol):
    """A way to one engine rank's memory."""

    detail: str
    """What really carries the bytes, as far as the library says (``tcp``, ``UCX``)."""

    def post(self, pieces: Sequence[Piece], memory: Memory) -> Write:
        """Start a batch; all sources lie in registered memory of one kind.

        Raises:
            TransportError: the library refused the batch.
        """

    def close(self) -> None:
        """Forget the peer."""


class Transport(Protocol):
    """One library in this process."""

    name: str
    protocol: str
    """What the library is told to use (``tcp``, ``rdma``, ``UCX``)."""
    revocable: bool
    """Whether an engine that revokes its sessions stops every write that is under way through them."""

    def stages_on(self, session: Session) -> bool:
        """Whether packed bytes for this peer had better lie on a GPU."""

    def register(self, address: int, length: int, memory: Memory) -> object:
        """Make memory writable from; returns a token for ``deregister``.

        Raises:
            TransportError: with count, bytes and the library's code.
        """

    def deregister(self, token: object) -> None:
        """Undo ``register``."""

    def connect(self, session: Session) -> Connection:
        """Open a way to a peer.

        Raises:
            TransportError: the peer cannot be reached, or what it published does not fit.
        """

    def close(self) -> None:
        """Give back everything that is still registered or connected."""
