"""A transport into this process's own memory, with faults that real ones cannot be made to show on demand."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from weightsync_core.errors import TransportError
from weightsync_core.tables import Session
from weightsync_sender.transports import Memory, Piece, WriteState


@dataclass
class LoopbackWrite:
    pieces: Sequence[Piece]
    state: WriteState = WriteState.PENDING
    error: str = ""

    def poll(self) -> WriteState:
        return self.state

    def land(self) -> None:
        for piece in self.pieces:
            ctypes.memmove(piece.target, piece.source, piece.length)
        self.state = WriteState.DONE


@dataclass
class LoopbackConnection:
    behaviour: Callable[[LoopbackWrite], None] = LoopbackWrite.land
    detail: str = "loopback"
    writes: list[LoopbackWrite] = field(default_factory=list)
    registered: dict[int, int] = field(default_factory=dict)

    def post(self, pieces: Sequence[Piece], memory: Memory) -> LoopbackWrite:
        for piece in pieces:
            if not any(start <= piece.source and piece.source + piece.length <= start + size for start, size in self.registered.items()):
                raise TransportError(f"source {piece.source:#x} of {piece.length} bytes is not registered")
        write = LoopbackWrite(list(pieces))
        self.writes.append(write)
        self.behaviour(write)
        return write

    def close(self) -> None:
        pass


@dataclass
class LoopbackTransport:
    name: str = "loopback"
    registered: dict[int, int] = field(default_factory=dict)
    registrations: int = 0
    full: bool = False

    def stages_on(self, session: Session) -> bool:
        return False

    def register(self, address: int, length: int, memory: Memory) -> int:
        if self.full:
            raise TransportError("no more memory can be registered")
        for start, size in self.registered.items():
            if address < start + size and start < address + length:
                raise TransportError(f"{address:#x} overlaps registered {start:#x}")
        self.registered[address] = length
        self.registrations += 1
        return address

    def deregister(self, token: object) -> None:
        assert isinstance(token, int)
        del self.registered[token]

    def connect(self, session: Session) -> LoopbackConnection:
        return LoopbackConnection(registered=self.registered)

    def close(self) -> None:
        pass
