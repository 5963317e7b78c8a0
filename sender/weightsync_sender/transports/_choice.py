"""Which transport a name stands for."""

from __future__ import annotations

from weightsync_core.errors import TransportError
from weightsync_sender.transports._base import Transport
from weightsync_sender.transports.mooncake import MooncakeTransport
from weightsync_sender.transports.nixl import NixlTransport


def make_transport(name: str, host: str) -> Transport:
    """The transport of ``mooncake`` or ``nixl``.

    Args:
        host: this machine's address as peers see it; Mooncake publishes it.

    Raises:
        MissingLibrary: the library is not installed here.
        TransportError: it cannot start.
    """
    if name == "mooncake":
        return MooncakeTransport(host)
    if name == "nixl":
        return NixlTransport()
    raise TransportError(f"unknown transport {name!r}; known are mooncake and nixl")
