"""`/metrics` and `/healthz` of a service, on aiohttp.

Beyond loopback `/metrics` is only for who sends the token, as `Authorization: Bearer`; `/healthz` is open.
"""

from __future__ import annotations

import hmac
import os
import socket
from collections.abc import Callable
from typing import Any

from aiohttp import web

from headrace.errors import ServiceError
from headrace.telemetry.metrics import CONTENT_TYPE, Metrics

LOOPBACK = ("127.0.0.1", "::1", "localhost")


class Endpoint:
    """Serves until closed. `health` returns what `/healthz` shows as JSON; its "ok" decides between 200 and 503."""

    def __init__(self, metrics: Metrics, health: Callable[[], dict[str, Any]], token: str = "") -> None:
        self._metrics = metrics
        self._token = token.encode()
        self._health = health
        self._runner: web.AppRunner | None = None
        self.port = 0

    async def start(self, host: str, port: int) -> str:
        """Bind; port 0 takes a free one. Returns the URL of `/metrics`.

        Raises ServiceError when the port is taken, or the host reaches beyond loopback and there is no token.
        """
        if host not in LOOPBACK and not self._token:
            raise ServiceError(
                f"metrics host {host!r} reaches beyond loopback, where /metrics would be open; use 127.0.0.1, or set "
                "HEADRACE_METRICS_TOKEN_FILE to a file with a token that Prometheus sends"
            )
        self._open = host in LOOPBACK
        app = web.Application()
        app.router.add_get("/metrics", self._serve_metrics)
        app.router.add_get("/healthz", self._serve_health)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port).start()
        except OSError as error:
            await self._runner.cleanup()
            why = os.strerror(error.errno or 0)
            raise ServiceError(
                f"port {port} of /metrics on {host} cannot be bound ({why}); choose another by telemetry.port or "
                "HEADRACE_METRICS_PORT, or 0 for a free one"
            ) from error
        self.port = self._runner.addresses[0][1]
        reached = socket.gethostname() if host in ("0.0.0.0", "::") else host  # noqa: S104 - a comparison
        return f"http://{f'[{reached}]' if ':' in reached else reached}:{self.port}/metrics"

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _serve_metrics(self, request: web.Request) -> web.Response:
        given = request.headers.get("Authorization", "").encode(errors="replace")
        if not self._open and not hmac.compare_digest(given, b"Bearer " + self._token):
            return web.Response(status=401, text="the metrics token is missing or wrong\n")
        return web.Response(body=self._metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    async def _serve_health(self, request: web.Request) -> web.Response:
        state = self._health()
        return web.json_response(state, status=200 if state.get("ok") else 503)
