"""`/metrics` and `/healthz` of a service, on aiohttp."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aiohttp import web

from headrace.errors import ServiceError
from headrace.telemetry.metrics import CONTENT_TYPE, Metrics

LOOPBACK = ("127.0.0.1", "::1", "localhost")


class Endpoint:
    """Serves until closed. `health` returns what `/healthz` shows as JSON; its "ok" decides between 200 and 503."""

    def __init__(self, metrics: Metrics, health: Callable[[], dict[str, Any]]) -> None:
        self._metrics = metrics
        self._health = health
        self._runner: web.AppRunner | None = None
        self.port = 0

    async def start(self, host: str, port: int) -> str:
        """Bind; port 0 takes a free one. Returns the URL of `/metrics`.

        Raises ServiceError when the port is taken or the host reaches beyond loopback.
        """
        if host not in LOOPBACK:
            raise ServiceError(
                f"telemetry.host = {host!r} reaches beyond loopback, where /metrics would be open; use 127.0.0.1"
            )
        app = web.Application()
        app.router.add_get("/metrics", self._serve_metrics)
        app.router.add_get("/healthz", self._serve_health)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port).start()
        except OSError as error:
            await self._runner.cleanup()
            raise ServiceError(
                f"telemetry.port = {port} on {host} cannot be bound ({error.strerror}); "
                "choose another or 0 for a free one"
            ) from error
        self.port = self._runner.addresses[0][1]
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}/metrics"

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _serve_metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self._metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    async def _serve_health(self, request: web.Request) -> web.Response:
        state = self._health()
        return web.json_response(state, status=200 if state.get("ok") else 503)
