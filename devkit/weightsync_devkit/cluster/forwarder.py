"""Carries a port of this machine into the cluster's network namespace, from which there is no other way out or in.

``python -m weightsync_devkit.cluster.forwarder ROOT PORT PID`` is started by :class:`weightsync_devkit.cluster.Cluster`.
"""

from __future__ import annotations

import asyncio
import ctypes
import socket
import sys


def forward(port: int, pid: int) -> None:
    """Carry 127.0.0.1:port here to the API server inside ``pid``'s network namespace, for ever."""
    listener = socket.create_server(("127.0.0.1", port))  # before this process moves
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/proc/{pid}/ns/net") as namespace:
        if libc.setns(namespace.fileno(), 0):
            raise OSError(ctypes.get_errno(), "setns")

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while block := await reader.read(65536):
                writer.write(block)
                await writer.drain()
        except OSError:
            pass  # either end hung up; closing tells the other
        finally:
            writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", 6443)
        except OSError:
            writer.transport.abort()
            return
        await asyncio.gather(pump(reader, inner_writer), pump(inner_reader, writer))

    async def main() -> None:
        await (await asyncio.start_server(serve, sock=listener)).serve_forever()

    asyncio.run(main())


if __name__ == "__main__":
    forward(int(sys.argv[2]), int(sys.argv[3]))
