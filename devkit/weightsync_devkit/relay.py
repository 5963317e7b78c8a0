"""A TCP relay whose connections can be made to fall silent, as a proxy that buffers or a network that drops packets does."""

from __future__ import annotations

import asyncio
import contextlib
import threading


class Relay:
    """Passes bytes between a port of its own and another; use as a context manager."""

    def __init__(self, host: str, port: int) -> None:
        """Args: host, port: where connections go."""
        self._to = (host, port)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._era = 0
        self.port = 0
        """Where to connect, on 127.0.0.1."""

    def __enter__(self) -> Relay:
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(asyncio.start_server(self._serve, "127.0.0.1", 0), self._loop).result(10)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def __exit__(self, *exc: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def silence(self) -> None:
        """Let no more bytes through on connections that stand; new ones work."""
        self._era += 1

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        other_reader, other_writer = await asyncio.open_connection(*self._to)
        era = self._era
        await asyncio.gather(self._pass(era, reader, other_writer), self._pass(era, other_reader, writer))

    async def _pass(self, era: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while block := await reader.read(65536):
                if era == self._era:
                    writer.write(block)
                    await writer.drain()
            writer.close()
