"""Where one server is: started by us, or given by its URL."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

from headrace.errors import EngineError
from producers.engines.sglang.client import SglangClient
from producers.engines.sglang.launch import LaunchSpec, Server
from producers.engines.sglang.options import Options

CONNECT_S = 30.0
"""For a server given by its URL to answer for the first time."""
PROBE_S = 5.0
"""For a server that was started to answer after something failed; else it is started anew."""


class Place:
    """For one event loop."""

    def __init__(
        self, name: str, options: Options, *, url: str = "", key: str = "", spec: LaunchSpec | None = None
    ) -> None:
        self._name, self._options = name, options
        self._url, self._key, self._spec = url, key, spec
        self._server: Server | None = None
        self._client: SglangClient | None = None

    @property
    def client(self) -> SglangClient:
        assert self._client is not None
        return self._client

    @property
    def url(self) -> str:
        return self._url

    async def open(self) -> dict[str, Any]:
        """Have a server that answers; what it says of itself. Raises EngineError."""
        if self._client is None:
            if self._spec is not None:
                self._server = Server(self._spec, self._name)
                self._url, self._key = self._server.url, self._server.admin_key
            self._client = SglangClient(self._url, self._key)
            if self._server is not None:
                await self._server.ready(self._client)
            else:
                # Where it does not come, the question below has the reason.
                await self.comes_back(CONNECT_S)
        return await self._client.server_info(timeout_s=self._options.hang_s)

    def ended(self) -> str | None:
        """What its process said last, where that is ours and has ended."""
        if self._server is None or self._server.alive:
            return None
        return self._server.last_words()

    async def answers(self, seconds: float) -> bool:
        """Whether its scheduler does."""
        if self._client is None or (self._server is not None and not self._server.alive):
            return False
        try:
            await self._client.server_info(timeout_s=seconds)
        except EngineError:
            return False
        return True

    async def comes_back(self, seconds: float) -> bool:
        """Whether a server given by its URL answers within so many seconds."""
        deadline = time.monotonic() + seconds
        while not await self.answers(min(self._options.hang_s, seconds)):
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(random.uniform(0.3, 0.6))
        return True

    async def mend(self) -> bool:
        """After a failure: whether there is, or will be by `open`, a server. One of ours that does not answer goes."""
        if self._spec is None:
            return await self.comes_back(self._options.outage_s)
        if not await self.answers(min(PROBE_S, self._options.hang_s)):
            await self.close()
        return True

    async def close(self) -> None:
        """Let go of the server; end it where it is ours. `open` may come again."""
        client, server = self._client, self._server
        self._client = self._server = None
        if client is not None:
            await client.close()
        if server is not None:
            await server.close()
