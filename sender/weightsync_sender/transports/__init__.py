"""One-sided writes into engine memory: Mooncake and NIXL behind one protocol, their libraries imported when first used."""

from weightsync_sender.transports._base import Connection, Memory, Piece, Transport, Write, WriteState
from weightsync_sender.transports._choice import make_transport

__all__ = ["Connection", "Memory", "Piece", "Transport", "Write", "WriteState", "make_transport"]
