"""A proxy before a real server, which a test has fail as servers and networks do."""

from __future__ import annotations

import asyncio
import contextlib
import json
from types import TracebackType

import aiohttp
from aiohttp import web


class FaultyProxy:
    """Passes everything on, until told otherwise.

    `fail`: paths that are answered with 500. `silent`: paths that are not answered while it is set. `drop`: closes the
    connection instead of answering; `cut` does so with all that are open. `restarted`: the server looks like another
    one after a start.
    """

    def __init__(self, target: str) -> None:
        self._target = target
        self.fail: set[str] = set()
        self.failed = 0
        self.silent: set[str] = set()
        self.drop = False
        self.restarted = False
        self.url = ""
        self._loud = asyncio.Event()
        self._open: list[web.Request] = []

    async def __aenter__(self) -> FaultyProxy:
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0))
        app = web.Application(client_max_size=1 << 28)
        app.router.add_route("*", "/{tail:.*}", self._serve)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.speak()
        await self._runner.cleanup()
        await self._session.close()

    def cut(self) -> None:
        """Close every connection on which an answer is waited for."""
        for request in tuple(self._open):
            if request.transport is not None:
                request.transport.abort()

    def speak(self) -> None:
        self.silent = set()
        self._loud.set()
        self._loud = asyncio.Event()

    async def _serve(self, request: web.Request) -> web.Response:
        self._open.append(request)
        try:
            return await self._answer(request)
        finally:
            self._open.remove(request)

    async def _answer(self, request: web.Request) -> web.Response:
        if self.drop:
            assert request.transport is not None
            request.transport.abort()
        if request.path in self.fail:
            self.failed += 1
            return web.json_response({"error": {"message": "this was asked for"}}, status=500)
        if request.path in self.silent:
            await self._loud.wait()
        headers = {name: request.headers[name] for name in ("Authorization", "Content-Type") if name in request.headers}
        with contextlib.suppress(aiohttp.ClientConnectionError):
            async with self._session.request(
                request.method, self._target + request.path_qs, data=await request.read(), headers=headers
            ) as response:
                body = await response.read()
                if self.restarted and request.path == "/server_info":
                    body = json.dumps({**json.loads(body), "startup_time": {"scheduler_e2e": 1.5}}).encode()
                return web.Response(body=body, status=response.status, content_type=response.content_type)
        return web.Response(status=502)
