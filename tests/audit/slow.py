"""What planted bottlenecks are made of: an environment whose reward takes its time, and a wire that does."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from pathlib import Path

from producers.environments.api import Rollout
from producers.environments.single_turn import SingleTurn

PIECE = 1 << 14
"""Bytes that a slow wire passes on at once."""


class Sums:
    """Prompts that differ by a number; half of all completions are right. Scoring one takes `score_s` seconds."""

    def __init__(self, *, score_s: float = 0.0) -> None:
        self._score_s = score_s

    def __len__(self) -> int:
        return 64

    def eval_size(self) -> int:
        return 1

    def episode(self, split: str, index: int, seed: int) -> SingleTurn:
        return SingleTurn(f"{split} {index}", answer=index)

    async def score(self, rollout: Rollout) -> float:
        time.sleep(self._score_s)  # noqa: ASYNC251 - as a verifier that computes
        return float(sum(rollout.completion.encode()) % 2)

    def correct(self, rollout: Rollout) -> bool:
        return False


class SlowWire:
    """Passes bytes on to the address in a file; those that come back at most so many a second, of all connections."""

    def __init__(self, bytes_per_s: float, file: Path) -> None:
        self.file = file
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0
        self._server: asyncio.Server | None = None
        self._pumps: set[asyncio.Task[None]] = set()
        self.port = 0

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for pump in self._pumps:
            pump.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self.file.read_text().rpartition(":")
        there, back = await asyncio.open_connection(host, int(port))
        for pump in (self._pump(reader, back, slow=False), self._pump(there, writer, slow=True)):
            task = asyncio.create_task(pump)
            self._pumps.add(task)
            task.add_done_callback(self._pumps.discard)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, slow: bool) -> None:
        with suppress(OSError):
            while piece := await reader.read(PIECE):
                if slow:
                    self._free_at = max(self._free_at, time.monotonic()) + len(piece) / self._bytes_per_s
                    await asyncio.sleep(self._free_at - time.monotonic())
                writer.write(piece)
                await writer.drain()
        writer.close()
