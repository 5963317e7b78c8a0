"""One HTTP port of a trainer pod: /identity and /status for the operator, /metrics for Prometheus, /healthz for the kubelet."""

from __future__ import annotations

import json
import socket
import socketserver
import threading
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

from weightsync_core.errors import WeightSyncError

_READ_SECONDS = 5.0


@dataclass
class SenderStatus:
    """What the operator asks a sender; set by the sender, read by the HTTP threads."""

    weight_sync: str
    trainer: str
    identity: dict[str, str]
    """sglang, torch, arch: fields of :class:`weightsync_core.tables.Identity`."""
    transport: str = ""
    process: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Random, drawn at start."""
    epoch: int = -1
    """Of the assignment in force, -1 for none."""
    version: str = ""
    """The newest version brought to engines, "" for none."""
    updating: str = ""
    """The version that is being brought now, "" for none."""
    updated_at: float = 0.0
    """Unix time of the newest version."""
    engines: dict[str, str] = field(default_factory=dict)
    """Engine -> state in the last update."""
    error: str = ""
    """Of the last update, "" if it went well."""

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}


class PortInUse(WeightSyncError, OSError):
    """The port is taken: by another rank of this pod, or another process."""


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = 32

    def server_bind(self) -> None:
        """Bind without asking a name server for this machine's name, which can take a minute."""
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "localhost", self.server_address[1]
        self.setup_environ()


class _DualServer(_Server):
    address_family = socket.AF_INET6
    """With V6ONLY off: pods may have addresses of either family."""


def _server_class(host: str) -> type[_Server]:
    return _DualServer if not host and socket.has_dualstack_ipv6() else _Server


class _Handler(WSGIRequestHandler):
    timeout = _READ_SECONDS
    """A client that connects and says nothing is dropped."""

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are no news."""


def serve(port: int, status: SenderStatus, registry: CollectorRegistry, host: str = "") -> Callable[[], None]:
    """Serve in daemon threads; returns what stops it.

    Args:
        host: IPv4 address to listen on; default all of both families.

    Raises:
        PortInUse: with what to do.
    """
    metrics = make_wsgi_app(registry)

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        if path == "/metrics":
            answer: Iterable[bytes] = metrics(environ, start_response)
            return answer
        known: dict[str, Callable[[], Any]] = {
            "/identity": lambda: {key: value for key, value in status.as_dict().items() if key in _IDENTITY},
            "/status": status.as_dict,
            "/healthz": lambda: {"status": "ok"},
        }
        found = known.get(path)
        body = json.dumps(found() if found else {"error": f"no such page; there are {', '.join((*known, '/metrics'))}"}).encode()
        start_response("200 OK" if found else "404 Not Found", [("Content-Type", "application/json"), ("Content-Length", str(len(body)))])
        return [body]

    try:
        server = make_server(host, port, application, server_class=_server_class(host), handler_class=_Handler)
    except OSError as error:
        raise PortInUse(
            f"port {port} cannot be served: {error}; one process of a pod serves it (the first rank), set WEIGHTSYNC_PORT for another port"
        ) from error
    threading.Thread(target=server.serve_forever, name="weightsync-http", daemon=True).start()

    def stop() -> None:
        server.shutdown()
        server.server_close()

    return stop


_IDENTITY = ("weight_sync", "trainer", "identity", "transport", "process")
