"""One engine as a sender knows it, kept from update to update: its layout, its tables, what fills them, its sessions.

``connect`` reads what the engine says and refuses what cannot be written; it changes nothing on the engine.
"""

from __future__ import annotations

import contextlib
import json
import logging
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weightsync_core.endpoints import Endpoint
from weightsync_core.errors import DeadlineExceeded, EngineRefused, WeightSyncError, listing
from weightsync_core.tables import Identity, ParameterTable, Session
from weightsync_sender.engine_client import Deadline, EngineClient
from weightsync_sender.replica.compiled import CompiledRank, ReplicaStore
from weightsync_sender.replica.identity import local_identity
from weightsync_sender.replica.layout import Layout, read_layout, refuse_unsupported
from weightsync_sender.settings import SenderSettings
from weightsync_sender.sources import TensorMeta
from weightsync_sender.transports import Connection, Transport

log = logging.getLogger(__name__)

TargetKey = tuple[str, int]
"""(role, rank)."""

STOCK_NOTES = (
    "no plugin on this engine: roles, dtypes and shapes of its parameters are taken from the model built here",
    "no plugin on this engine: its process is identified by transfer session and start time",
    "no plugin on this engine: buffers that sglang does not recompute after an update (Gemma's weight + 1) stay stale",
)
NO_LEASE_NOTE = "this engine has no lease route: two senders at once cannot be kept apart"


class ConfigFolders:
    """Where model configurations are found: a folder given by the user, the engine's own path, or the plugin's copy."""

    def __init__(self, given: str | None) -> None:
        self._given = given
        self._written: dict[str, tempfile.TemporaryDirectory[str]] = {}

    def folder(self, client: EngineClient, info: Mapping[str, Any], deadline: Deadline) -> str:
        """A local folder with the config.json of an engine's model.

        Raises:
            EngineRefused: none can be had.
        """
        if self._given is not None:
            return self._given
        path = str(info.get("model_path", ""))
        if (Path(path) / "config.json").is_file():
            return path
        identity = client.identity(deadline) or {}
        if not identity.get("config"):
            raise EngineRefused(
                f"{client.endpoint} serves {path!r}, which has no config.json on this machine, and it does not send one: give the "
                "folder with the model's config (config=...)"
            )
        text = json.dumps(identity["config"], sort_keys=True)
        if text not in self._written:
            folder = tempfile.TemporaryDirectory(prefix="weightsync-config-")
            (Path(folder.name) / "config.json").write_text(text, encoding="utf-8")
            self._written[text] = folder
        return self._written[text].name

    def close(self) -> None:
        """Remove copies."""
        for folder in self._written.values():
            folder.cleanup()
        self._written.clear()


@dataclass
class Engine:
    """One engine."""

    endpoint: Endpoint
    client: EngineClient
    id: str = ""
    """Its name in an assignment; empty for an engine that was named by its address."""
    info: dict[str, Any] = field(default_factory=dict)
    layout: Layout | None = None
    tables: list[ParameterTable] = field(default_factory=list)
    ranks: dict[TargetKey, CompiledRank] = field(default_factory=dict)
    stock: bool = False
    stuck: list[Callable[[], bool]] = field(default_factory=list)
    """For each write that was given up on: whether it is still under way."""
    fenced: bool = False
    """Whether this process left it half written; of a stock engine nobody else can tell."""
    _connecting: threading.Lock = field(default_factory=threading.Lock)
    """Held while connecting: an update that was interrupted leaves that to end by itself, maybe into the next update."""
    _let_go: threading.Event | None = None
    """Ends the renewal of a lease that is kept for a write that hangs."""
    _compiled: tuple[tuple[Any, ...], tuple[str, ...]] | None = None
    """What ``ranks`` were compiled for, and the HF tensors that were left over."""
    _connections: dict[TargetKey, tuple[Session, Connection]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """How reports and messages call it: its id, else its address."""
        return self.id or self.endpoint.url

    @property
    def notes(self) -> tuple[str, ...]:
        """What could not be checked, and why."""
        notes = list(STOCK_NOTES) if self.stock else []
        if not self.client.has_lease:
            notes.append(NO_LEASE_NOTE)
        there, here = self.tables[0].identity.torch if self.tables else "", local_identity().torch
        if there and there != here:
            notes.append(f"torch {there} there, {here} here")
        return tuple(notes)

    @property
    def generation(self) -> str:
        """Equal as long as every rank is the same process with the same memory."""
        return "+".join(f"{table.role}:{table.placement.rank}:{table.generation}" for table in self.tables)

    @property
    def planned(self) -> int:
        """Bytes of one update."""
        return sum(rank.program.written for rank in self.ranks.values())

    @property
    def via(self) -> str:
        """The transport as really used, e.g. ``mooncake/tcp``."""
        return ", ".join(sorted({f"{session.transport}/{connection.detail}" for session, connection in self._connections.values()}))

    def connect(self, settings: SenderSettings, protocol: str, folders: ConfigFolders, deadline: Deadline) -> None:
        """Read the engine's layout and tables.

        Raises:
            EngineRefused: it cannot be written; nothing was changed on it.
            DeadlineExceeded: the attempt of an interrupted update is still waiting for an answer.
        """
        if not self._connecting.acquire(timeout=deadline.left):
            raise DeadlineExceeded(f"{self.name}: an earlier attempt to connect still waits for an answer after {deadline.seconds:g} s")
        try:
            self._connect(settings, protocol, folders, deadline)
        finally:
            self._connecting.release()

    def _connect(self, settings: SenderSettings, protocol: str, folders: ConfigFolders, deadline: Deadline) -> None:
        self.client.forget_lease()
        self.info = self.client.server_info(deadline)
        refuse_unsupported(self.info)
        self.read_tables(settings, protocol, deadline)
        identity = self.tables[0].identity
        self._require_same_build(identity)
        self.layout = read_layout(self.info, folders.folder(self.client, self.info, deadline), identity.arch)

    def adopt(self, info: dict[str, Any], tables: list[ParameterTable], folders: ConfigFolders, deadline: Deadline) -> None:
        """Take over what another trainer rank has read of this engine.

        Raises:
            EngineRefused: this rank runs another build than the engine.
        """
        self.info, self.tables = info, tables
        self.stock = not tables[0].identity.arch
        self._require_same_build(tables[0].identity)
        self.layout = read_layout(info, folders.folder(self.client, info, deadline), tables[0].identity.arch)

    def read_tables(self, settings: SenderSettings, protocol: str, deadline: Deadline) -> None:
        """Read the tables as they are now, and refuse what must not be written.

        Raises:
            EngineRefused: a rank refuses, or does not publish over the chosen transport.
        """
        tables = self.client.tables(deadline)
        self.stock = tables is None
        if tables is None:
            if settings.transport != "mooncake":
                raise EngineRefused(
                    f"{self.name} has no p2p-weightsync plugin; without it only mooncake is published, {settings.transport} was asked for"
                )
            tables = self.client.stock_tables(self.info, protocol, deadline)
        for table in tables:
            if table.refusal:
                raise EngineRefused(f"{self.name} {table.label} must not be written; the engine says: {table.refusal}")
            if settings.transport not in table.sessions:
                known = listing(table.sessions) or "none"
                why = f"; {settings.transport}: {table.unavailable[settings.transport]}" if settings.transport in table.unavailable else ""
                raise EngineRefused(
                    f"{self.name} {table.label} publishes over {known}, {settings.transport} was asked for{why}. Start the engine with "
                    f"WEIGHTSYNC_TRANSPORTS={settings.transport}, or choose the other transport"
                )
        self.tables = tables

    def compile(
        self, store: ReplicaStore, manifest: Mapping[str, TensorMeta], settings: SenderSettings, only: set[TargetKey] | None = None
    ) -> tuple[str, ...]:
        """Build and prove the programs of all targets; returns HF tensors left over.

        Args:
            only: build the programs of these targets, and leave it to another trainer rank to prove that nothing is missing.
        """
        assert self.layout is not None
        known = (self.generation, self.layout.key, settings.allow_unused, settings.allow_cast, dict(manifest), only)
        if self._compiled is None or self._compiled[0] != known:
            self._compiled = None
            left: tuple[str, ...] = ()
            if only is None:
                self.ranks, left = store.compile_engine(
                    self.layout, self.tables, manifest, allow_unused=settings.allow_unused, allow_cast=settings.allow_cast
                )
            else:
                mine = [table for table in self.tables if (table.role, table.placement.rank) in only]
                self.ranks = store.compile_ranks(self.layout, mine, manifest)
            self._compiled = (known, left)
        return self._compiled[1]

    def open_connections(self, transport: Transport, settings: SenderSettings, only: set[TargetKey]) -> dict[TargetKey, Connection]:
        """Connections to these targets; those whose session is unchanged are kept, those to others closed.

        Raises:
            TransportError: a peer cannot be reached.
            EngineRefused: RDMA is required and something else would be used.
        """
        for key in set(self._connections) - only:
            self._connections.pop(key)[1].close()
        for table in self.tables:
            key, session = (table.role, table.placement.rank), table.sessions[settings.transport]
            if key not in only:
                continue
            known = self._connections.get(key)
            if known is not None and known[0] == session:
                continue
            if known is not None:
                known[1].close()
                del self._connections[key]
            connection = transport.connect(session)
            if settings.require_rdma and "rdma" not in connection.detail.lower():
                connection.close()
                raise EngineRefused(f"{self.name} {table.label} would be written over {connection.detail}, RDMA is required")
            self._connections[key] = (session, connection)
        return {key: connection for key, (_, connection) in self._connections.items()}

    def drop_connections(self) -> None:
        """Forget peers, so that the next update connects from scratch."""
        for _, connection in self._connections.values():
            connection.close()
        self._connections.clear()

    def still_stuck(self) -> bool:
        """Whether a write that was given up on may still land."""
        before = bool(self.stuck)
        self.stuck = [pending for pending in self.stuck if pending()]
        if before and not self.stuck:
            self.drop_connections()  # not earlier: NIXL calls a write over whose peer was forgotten
            if self._let_go is not None:
                self._let_go.set()
        return bool(self.stuck)

    def keep_lease(self, owner: str, seconds: float) -> None:
        """Renew a lease in the background until nothing is stuck any more, as far as ``still_stuck`` was asked, or this process ends."""
        let_go = self._let_go = threading.Event()

        def keep() -> None:
            while not let_go.wait(seconds / 3):
                with contextlib.suppress(WeightSyncError):
                    self.client.take_lease(owner, seconds, Deadline.after(seconds / 3, "renewing the lease"), renew=True)
            with contextlib.suppress(WeightSyncError):
                self.client.give_back_lease(owner, Deadline.after(seconds / 3, "giving the lease back"))

        threading.Thread(target=keep, name="weightsync-kept-lease", daemon=True).start()

    def close(self) -> None:
        """Close HTTP and peers; of an engine with a write under way nothing is closed, since that would not stop it."""
        if self.still_stuck():
            log.warning("left open, a write is still under way engine=%s", self.name)
            return
        self.drop_connections()
        self.client.close()

    def _require_same_build(self, identity: Identity) -> None:
        here = local_identity()
        differences = []
        if identity.sglang and identity.sglang != here.sglang:
            differences.append(f"sglang {identity.sglang} there, {here.sglang} here")
        if identity.arch and identity.arch != here.arch:
            differences.append(f"architecture {identity.arch} there, {here.arch} here")
        if self.stock and ("cpu" if self.info.get("device") == "cpu" else "gpu") != ("cpu" if here.arch == "cpu" else "gpu"):
            differences.append(f"device {self.info.get('device')} there, {here.arch} here")
        if differences:
            raise EngineRefused(
                f"{self.name} cannot be written from here: {listing(differences)}. Bytes depend on both; run the sender with the engine's "
                "sglang build on the same kind of GPU"
            )
