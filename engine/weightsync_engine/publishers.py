"""Transports on the engine's side: registered memory, and what a peer needs to write it.

One publisher per transport and scheduler process. Registration is additive: a parameter that moved is registered when
the table is next asked for. ``opened``/``closed`` bracket an update.
"""

from __future__ import annotations

import base64
import logging
import os
import threading
import time
import uuid
from collections.abc import Iterable
from typing import Any, Protocol

from weightsync_core.errors import TransportError
from weightsync_core.libraries import load_library, mooncake_protocol
from weightsync_engine.memory import merge_spans

log = logging.getLogger(__name__)


class Publisher(Protocol):
    """One transport of one engine process."""

    def cover(self, spans: list[tuple[int, int]], device: int | None) -> None:
        """Register what is not registered yet; ``device`` is a CUDA index, None for host memory."""

    def session(self) -> dict[str, Any]:
        """Fields of :class:`weightsync_core.tables.Session` without the transport's name."""

    def opened(self) -> None:
        """An update begins."""

    def closed(self) -> None:
        """An update ended."""

    def close(self) -> None:
        """Break all connections: once this returns, no peer's write lands over a network any more."""


def make_publisher(transport: str, host: str) -> Publisher:
    """The publisher of ``mooncake`` or ``nixl`` for this process."""
    return MooncakePublisher(host) if transport == "mooncake" else NixlPublisher()


class _Registered:
    """Spans known to the library."""

    def __init__(self) -> None:
        self.spans: list[tuple[int, int]] = []
        self.device: int | None = None

    def missing(self, spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Those spans that are not inside a registered one."""
        return [
            (start, length)
            for start, length in spans
            if not any(known <= start and start + length <= known + size for known, size in self.spans)
        ]

    def stale(self, span: tuple[int, int]) -> list[tuple[int, int]]:
        """Registered spans that overlap ``span``."""
        return [known for known in self.spans if known[0] < span[0] + span[1] and span[0] < known[0] + known[1]]


class MooncakePublisher:
    """Mooncake's transfer engine, told by sglang's own MOONCAKE_PROTOCOL and MOONCAKE_DEVICE."""

    def __init__(self, host: str) -> None:
        library = load_library("mooncake")
        self._protocol = mooncake_protocol()
        self._engine = library.TransferEngine()
        code = self._engine.initialize(host, "P2PHANDSHAKE", self._protocol, os.environ.get("MOONCAKE_DEVICE", ""))
        if code != 0:
            raise TransportError(
                f"mooncake: initialize({host}, {self._protocol}) returned {code}; expected 0. Set MOONCAKE_PROTOCOL=tcp on a "
                "host without RDMA, MOONCAKE_DEVICE to choose the card, and check the memlock limit (ulimit -l)"
            )
        self._address = f"[{host}]:{self._engine.get_rpc_port()}" if ":" in host else f"{host}:{self._engine.get_rpc_port()}"
        self._registered = _Registered()

    def cover(self, spans: list[tuple[int, int]], device: int | None) -> None:
        self._registered.device = device
        for span in self._registered.missing(spans):
            for old in self._registered.stale(span):
                self._engine.unregister_memory(old[0])
                self._registered.spans.remove(old)
                span = merge_spans([span, old])[0]
            code = self._engine.register_memory(*span)
            if code != 0:
                raise TransportError(_register_failed("mooncake", f"returned {code}", span, self._registered.spans))
            self._registered.spans.append(span)

    def session(self) -> dict[str, Any]:
        device = self._registered.device
        return {"memory": "cpu" if device is None else "cuda", "device": device or 0, "address": self._address, "detail": self._protocol}

    def opened(self) -> None:
        """Mooncake has threads of its own that sleep until traffic comes."""

    def closed(self) -> None:
        """Nothing to stop."""

    def close(self) -> None:
        # Unregistering refuses new writes only; a body that is under way lands until the engine's sockets are closed.
        for start, _ in self._registered.spans:
            self._engine.unregister_memory(start)
        self._engine = None


class NixlPublisher:
    """A NIXL agent without its progress thread, which would burn one core for ever (measured: 1.005 core idle).

    UCX needs the target to make progress for host memory, so a thread of ours polls, only while an update is open.
    """

    def __init__(self) -> None:
        api = load_library("nixl")
        self._backend = os.environ.get("SGLANG_REMOTE_INSTANCE_NIXL_BACKEND", "UCX")
        self._agent = api.nixl_agent(
            f"engine-{uuid.uuid4().hex}",
            api.nixl_agent_config(
                backends=[self._backend], enable_prog_thread=False, sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
            ),
        )
        if self._backend not in self._agent.backends:
            raise TransportError(
                f"nixl: backend {self._backend!r} could not be made; plugins found: {self._agent.get_plugin_list()}. "
                "Set SGLANG_REMOTE_INSTANCE_NIXL_BACKEND to one of them"
            )
        self._registered = _Registered()
        self._handles: list[Any] = []
        self._progress = _Progress(self._agent)

    def cover(self, spans: list[tuple[int, int]], device: int | None) -> None:
        self._registered.device = device
        missing = self._registered.missing(spans)
        if not missing:
            return
        if any(self._registered.stale(span) for span in missing):
            # Parameters moved over old ones: a handle covers many spans, so all are registered anew.
            self._deregister()
            missing = spans
        rows = [(start, length, device or 0, "") for start, length in missing]
        try:
            self._handles.append(self._agent.register_memory(rows, "DRAM" if device is None else "VRAM"))
        except Exception as error:  # nixl raises its own untyped binding errors
            raise TransportError(_register_failed("nixl", str(error), missing[0], self._registered.spans)) from error
        self._registered.spans.extend(missing)

    def session(self) -> dict[str, Any]:
        device = self._registered.device
        return {
            "memory": "cpu" if device is None else "cuda",
            "device": device or 0,
            "agent": self._agent.name,
            "metadata": base64.b64encode(self._agent.get_agent_metadata()).decode(),
            "detail": self._backend,
        }

    def opened(self) -> None:
        self._progress.resume()

    def closed(self) -> None:
        self._progress.pause()

    def close(self) -> None:
        self._progress.stop()
        self._deregister()
        self._agent = None

    def _deregister(self) -> None:
        for handle in self._handles:
            self._agent.deregister_memory(handle)
        self._handles.clear()
        self._registered.spans.clear()


class _Progress:
    """Drives an agent's progress between ``resume`` and ``pause``; asleep otherwise."""

    EAGER_SECONDS = 600.0
    """A session left open longer (a dead trainer's) is polled rarely, so it cannot burn a core for ever."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self._open = threading.Event()
        self._stopped = False
        self._since = 0.0
        self._thread: threading.Thread | None = None

    def resume(self) -> None:
        self._since = time.monotonic()
        self._open.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="weightsync-nixl-progress", daemon=True)
            self._thread.start()

    def pause(self) -> None:
        self._open.clear()

    def stop(self) -> None:
        """End the thread and let go of the agent."""
        self._stopped = True
        self._open.set()
        if self._thread is not None:
            self._thread.join()
        self._agent = None

    def _run(self) -> None:
        while True:
            self._open.wait()
            if self._stopped:
                return
            self._agent.get_new_notifs()
            time.sleep(0.00005 if time.monotonic() - self._since < self.EAGER_SECONDS else 0.02)


def _register_failed(transport: str, seen: str, span: tuple[int, int], done: list[tuple[int, int]]) -> str:
    hint = ""
    if "expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""):
        hint = " PYTORCH_CUDA_ALLOC_CONF sets expandable_segments:True, whose memory cannot be registered: unset it."
    return (
        f"{transport}: registering {span[1]} bytes at {span[0]:#x} {seen}; {len(done)} regions of "
        f"{sum(size for _, size in done)} bytes were registered before.{hint} Check the memlock limit (ulimit -l, IPC_LOCK) "
        "and the card's region limits"
    )
