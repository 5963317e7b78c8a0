"""NIXL agents. Everything is non-blocking and driven by polling from the sender's one thread.

The backend comes from SGLANG_REMOTE_INSTANCE_NIXL_BACKEND (default UCX), as on the engine's side.
"""

from __future__ import annotations

import base64
import os
import time
import uuid
from collections.abc import Sequence
from typing import Any

from weightsync_core.errors import TransportError
from weightsync_core.libraries import load_library
from weightsync_core.tables import Session
from weightsync_sender.transports._base import Memory, Piece, WriteState

_RECONNECT_SECONDS = 5.0
"""UCX closes endpoints lazily: adding a peer again right after its removal can fail for a moment (nixl#2109)."""


class NixlTransport:
    """One NIXL agent for this process, without its own progress thread: polling makes progress."""

    name = "nixl"
    revocable = False
    """UCX writes over shared memory and CUDA IPC where it can, which nobody can take back."""

    def __init__(self) -> None:
        api = load_library("nixl")
        self.protocol = self._backend = os.environ.get("SGLANG_REMOTE_INSTANCE_NIXL_BACKEND", "UCX")
        self._agent = api.nixl_agent(
            f"sender-{uuid.uuid4().hex}", api.nixl_agent_config(backends=[self._backend], enable_prog_thread=False)
        )
        if self._backend not in self._agent.backends:
            raise TransportError(f"nixl: backend {self._backend!r} could not be made; plugins found: {self._agent.get_plugin_list()}")
        self._registered: dict[int, Any] = {}
        self._peers: dict[str, str] = {}

    def stages_on(self, session: Session) -> bool:
        return session.memory == "cuda"

    def register(self, address: int, length: int, memory: Memory) -> int:
        kind, device = _kind(memory)
        try:
            self._registered[address] = self._agent.register_memory([(address, length, device, "")], kind)
        except Exception as error:  # nixl raises its own untyped binding errors
            raise TransportError(
                f"nixl: registering {length} bytes at {address:#x} ({kind}) raised {type(error).__name__}: {error}; "
                f"{len(self._registered)} regions are registered. Check the memlock limit (ulimit -l), or set a smaller buffer size"
            ) from error
        return address

    def deregister(self, token: object) -> None:
        assert isinstance(token, int)
        self._agent.deregister_memory(self._registered.pop(token))

    def connect(self, session: Session) -> _NixlConnection:
        if session.detail != self._backend:
            raise TransportError(
                f"nixl: the engine published over backend {session.detail!r}, this sender uses {self._backend!r}; set "
                "SGLANG_REMOTE_INSTANCE_NIXL_BACKEND alike on both sides"
            )
        metadata = base64.b64decode(session.metadata)
        if self._peers.get(session.agent) != session.metadata:
            if session.agent in self._peers:
                self._forget(session.agent)
            self._add(metadata, session.agent)
            self._peers[session.agent] = session.metadata
        return _NixlConnection(self, self._agent, session, self._backend)

    def close(self) -> None:
        for peer in list(self._peers):
            self._forget(peer)
        for address in list(self._registered):
            self.deregister(address)

    def _add(self, metadata: bytes, agent: str) -> None:
        deadline, pause = time.monotonic() + _RECONNECT_SECONDS, 0.01
        while True:
            try:
                added = self._agent.add_remote_agent(metadata)
            except Exception as error:  # nixl raises its own untyped binding errors
                if time.monotonic() + pause > deadline:
                    raise TransportError(f"nixl: cannot connect to {agent}: {type(error).__name__}: {error}") from error
                time.sleep(pause)
                pause *= 2
                continue
            if added not in (agent, agent.encode()):
                raise TransportError(f"nixl: metadata of {agent} names agent {added!r}; the engine's table is inconsistent")
            return

    def _forget(self, agent: str) -> None:
        self._peers.pop(agent, None)
        try:
            self._agent.remove_remote_agent(agent)
        except Exception as error:  # the peer may be dead; forgetting it must not fail
            if "NOT_FOUND" not in str(error) and "DISCONNECT" not in str(error):
                raise TransportError(f"nixl: forgetting {agent} raised {type(error).__name__}: {error}") from error


class _NixlWrite:
    def __init__(self, agent: Any, handle: Any, peer: str, total: int) -> None:
        self._agent, self._handle, self._peer, self._total = agent, handle, peer, total
        self._state = WriteState.PENDING
        self.error = ""
        self._trouble = ""

    def start(self) -> None:
        """Hand the batch over. One that raises may have been handed over in part: polling says when that is over."""
        try:
            answer = self._agent.transfer(self._handle)
        except Exception as error:  # nixl raises its own untyped binding errors
            self._trouble = f" ({type(error).__name__}: {error})"
            return
        if answer != "PROC":
            self._finish(answer)

    def poll(self) -> WriteState:
        if self._state is WriteState.PENDING:
            try:
                answer = self._agent.check_xfer_state(self._handle)
            except Exception as error:  # nixl raises its own untyped binding errors
                answer = f"{type(error).__name__}: {error}"
            if answer != "PROC":
                self._finish(answer)
        return self._state

    def _finish(self, answer: str) -> None:
        self._state = WriteState.DONE if answer == "DONE" else WriteState.FAILED
        if self._state is WriteState.FAILED:
            self.error = f"nixl: writing {self._total} bytes to {self._peer} ended with {answer}{self._trouble}"
        try:
            self._agent.release_xfer_handle(self._handle)
        except Exception as error:  # the write is over either way; a handle that stays is kept by nixl until the agent ends
            self.error = self.error and f"{self.error}; releasing its handle raised {error}"


class _NixlConnection:
    def __init__(self, transport: NixlTransport, agent: Any, session: Session, backend: str) -> None:
        self._transport, self._agent, self._session, self.detail = transport, agent, session, backend
        self._peer_kind = "DRAM" if session.memory == "cpu" else "VRAM"

    def post(self, pieces: Sequence[Piece], memory: Memory) -> _NixlWrite:
        kind, device = _kind(memory)
        peer = self._session.agent
        try:
            local = self._agent.get_xfer_descs([(piece.source, piece.length, device) for piece in pieces], kind)
            remote = self._agent.get_xfer_descs([(piece.target, piece.length, self._session.device) for piece in pieces], self._peer_kind)
            handle = self._agent.initialize_xfer("WRITE", local, remote, peer, b"")
        except Exception as error:  # nixl raises its own untyped binding errors
            raise TransportError(f"nixl: posting {len(pieces)} pieces to {peer} raised {type(error).__name__}: {error}") from error
        write = _NixlWrite(self._agent, handle, peer, sum(piece.length for piece in pieces))
        write.start()
        return write

    def close(self) -> None:
        self._transport._forget(self._session.agent)


def _kind(memory: Memory) -> tuple[str, int]:
    return ("DRAM", 0) if memory.device is None else ("VRAM", memory.device)
