"""Mooncake's transfer engine.

Its batch write blocks without holding the interpreter lock, so each connection has a few daemon threads of its own: a
hung peer holds up its own writes only, and never this process's exit. Told by sglang's MOONCAKE_PROTOCOL (default rdma
where there is a card, else tcp) and MOONCAKE_DEVICE.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from weightsync_core.errors import TransportError
from weightsync_core.libraries import load_library, mooncake_protocol
from weightsync_core.tables import Session
from weightsync_sender.transports._base import Memory, Piece, WriteState

_THREADS_PER_PEER = 2


class MooncakeTransport:
    """One transfer engine for this process."""

    name = "mooncake"

    def __init__(self, host: str) -> None:
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
        library = load_library("mooncake")
        self.protocol = mooncake_protocol()
        self.revocable = self.protocol in ("tcp", "rdma")  # the others map the engine's memory into this process
        self._engine = library.TransferEngine()
        code = self._engine.initialize(host, "P2PHANDSHAKE", self.protocol, os.environ.get("MOONCAKE_DEVICE", ""))
        if code != 0:
            raise TransportError(
                f"mooncake: initialize({host}, {self.protocol}) returned {code}, expected 0; set MOONCAKE_PROTOCOL=tcp on a host without "
                "RDMA, or MOONCAKE_DEVICE to the card to use"
            )
        self._registered: dict[int, int] = {}
        self._connections: set[_MooncakeConnection] = set()

    def stages_on(self, session: Session) -> bool:
        return session.memory == "cuda" and self.protocol != "tcp"

    def register(self, address: int, length: int, memory: Memory) -> int:
        code = self._engine.register_memory(address, length)
        if code != 0:
            raise TransportError(
                f"mooncake: registering {length} bytes at {address:#x} returned {code}, expected 0; {len(self._registered)} regions of "
                f"{sum(self._registered.values())} bytes are registered. Check the memlock limit (ulimit -l) and the card's limits, "
                "or set a smaller buffer size"
            )
        self._registered[address] = length
        return address

    def deregister(self, token: object) -> None:
        assert isinstance(token, int)
        self._engine.unregister_memory(token)
        self._registered.pop(token, None)

    def connect(self, session: Session) -> _MooncakeConnection:
        if not session.address:
            raise TransportError("mooncake: the engine published no transfer engine address")
        connection = _MooncakeConnection(self._engine, session.address, self.protocol, self._connections.discard)
        self._connections.add(connection)
        return connection

    def close(self) -> None:
        for connection in list(self._connections):
            connection.close()
        for address in list(self._registered):
            self.deregister(address)


class _MooncakeWrite:
    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = pieces
        self.error = ""
        self.over = threading.Event()

    def poll(self) -> WriteState:
        if not self.over.is_set():
            return WriteState.PENDING
        return WriteState.FAILED if self.error else WriteState.DONE


class _MooncakeConnection:
    def __init__(self, engine: Any, address: str, protocol: str, closed: Callable[[_MooncakeConnection], None]) -> None:
        self._closed = closed
        self._engine, self._address, self.detail = engine, address, protocol
        self._work: queue.SimpleQueue[_MooncakeWrite | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def post(self, pieces: Sequence[Piece], memory: Memory) -> _MooncakeWrite:
        write = _MooncakeWrite(pieces)
        self._work.put(write)
        if len(self._threads) < _THREADS_PER_PEER:
            thread = threading.Thread(target=self._run, name=f"weightsync-mooncake-{self._address}", daemon=True)
            self._threads.append(thread)
            thread.start()
        return write

    def close(self) -> None:
        for _ in self._threads:
            self._work.put(None)
        self._threads = []
        self._closed(self)

    def _run(self) -> None:
        while (write := self._work.get()) is not None:
            try:
                code = self._engine.batch_transfer_sync_write(
                    self._address,
                    [piece.source for piece in write.pieces],
                    [piece.target for piece in write.pieces],
                    [piece.length for piece in write.pieces],
                )
                if code != 0:
                    total = sum(piece.length for piece in write.pieces)
                    write.error = f"mooncake: writing {total} bytes in {len(write.pieces)} pieces to {self._address} returned {code}"
            except Exception as error:  # a thread must not die with a write unanswered
                write.error = f"mooncake: writing to {self._address} raised {type(error).__name__}: {error}"
            write.over.set()
