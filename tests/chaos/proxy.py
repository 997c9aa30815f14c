"""A wire that can be slow, stand still, or break in the middle of an answer: between some services and Redis."""

from __future__ import annotations

import asyncio
from contextlib import suppress

CHUNK = 1 << 16


class Proxy:
    """Passes on what comes to its port. Half of the services' starts go through it, the others straight to Redis."""

    def __init__(self, port: int) -> None:
        self._redis_port = port
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._open = asyncio.Event()
        self._open.set()
        self.delay_s = 0.0
        """Of every piece, both ways."""
        self.answers_to_lose = 0
        """So many connections break instead of passing on their next answer."""
        self.port = 0

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = int(self._server.sockets[0].getsockname()[1])

    def hold(self) -> None:
        """From now on nothing passes, and nobody is told."""
        self._open.clear()

    def go_on(self) -> None:
        self._open.set()

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in tuple(self._writers):
            writer.close()
        self._open.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._redis_port)
        except OSError:
            writer.close()
            return
        self._writers |= {writer, back}
        pumps = [
            asyncio.create_task(self._pump(reader, back, answers=False)),
            asyncio.create_task(self._pump(there, writer, answers=True)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            for end in (writer, back):
                self._writers.discard(end)
                end.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, answers: bool) -> None:
        with suppress(OSError):
            while piece := await reader.read(CHUNK):
                await self._open.wait()
                await asyncio.sleep(self.delay_s)
                if answers and self.answers_to_lose:
                    self.answers_to_lose -= 1
                    return
                writer.write(piece)
                await writer.drain()
