"""The driver's own Redis, which it kills, freezes, empties and starts again on what its file still holds."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import redis.asyncio as aioredis
from redis import exceptions

from deploy.redis_server import RedisServer
from tests.support import wait_until

# The archive reads the append-only file to its end, so that it may not be rewritten; and what Redis has answered for
# must be in it: `everysec` holds back even the writing while the disk is busy with the second before.
KEEP_FILE = {"auto-aof-rewrite-percentage": "0", "appendfsync": "no"}


class Server:
    """One Redis on one port, whatever becomes of its processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._server = RedisServer(folder, folder / "redis.log", ready_s=60)

    @property
    def url(self) -> str:
        return self._server.url

    @property
    def port(self) -> int:
        return int(self._server.place.rpartition(":")[2])

    async def start(self) -> None:
        await asyncio.to_thread(self._server.start)
        await self._set_up()

    async def again(self) -> None:
        """A new process on the file that is there."""
        self._server.spawn()
        await self._set_up()

    async def _set_up(self) -> None:
        async with self.client() as client:

            async def answers() -> bool:
                try:
                    return bool(await client.ping())
                except (exceptions.ConnectionError, exceptions.TimeoutError, exceptions.BusyLoadingError):
                    return False

            await wait_until(answers, "Redis answers again", 60)
            for name, value in KEEP_FILE.items():
                await client.config_set(name, value)

    def client(self) -> Any:
        """A plain client of the driver, to be used as a context."""
        return aioredis.Redis.from_url(self.url, socket_timeout=30, socket_connect_timeout=30)

    def crash(self) -> None:
        """As `kill -9` does."""
        self._server.kill()

    def leave(self) -> None:
        """As SIGTERM does."""
        assert self._server.stop(30), "Redis did not leave when it was told to"

    def signal(self, number: signal.Signals) -> None:
        assert self._server.child is not None
        os.kill(self._server.child.pid, number)
