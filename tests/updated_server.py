"""A completion server of our own whose weights are updated by vLLM's development routes."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web
from safetensors import safe_open

from producers.engines.openai.updates import ROUTES
from tests.completion_server import CompletionServer


@dataclass
class UpdatedServer(CompletionServer):
    """It loads the tensors of a folder, and tells their checksums; its completions do not depend on them.

    `refuse`: paths that are answered with 400. `without`: names that it passes over as it loads, and says nothing of.
    A pause answers what is under way with two tokens.
    """

    weights: dict[str, bytes] = field(default_factory=dict)
    label: str = "default"
    refuse: set[str] = field(default_factory=set)
    without: set[str] = field(default_factory=set)
    told: list[str] = field(default_factory=list)
    """Paths of orders, in order."""
    _going: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.paths = ROUTES
        self._going.set()

    @property
    def paused(self) -> bool:
        return not self._going.is_set()

    def _routes(self, app: web.Application) -> None:
        super()._routes(app)
        app.router.add_get("/is_paused", self._is_paused)
        app.router.add_get("/weight_info", self._weight_info)
        app.router.add_post("/{order:pause|resume|collective_rpc|update_weight_version|weight_checker}", self._order)

    async def _complete(self, request: web.Request) -> web.Response:
        await self._going.wait()
        return await super()._complete(request)

    async def _is_paused(self, request: web.Request) -> web.Response:
        return web.json_response({"is_paused": self.paused})

    async def _weight_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.label})

    async def _order(self, request: web.Request) -> web.Response:
        self.told.append(request.path)
        if request.path in self.refuse:
            return web.json_response({"error": {"message": f"no {request.path} today"}}, status=400)
        body = await request.json() if request.can_read_body else {}
        return web.json_response(self._done(request.path, body))

    def _done(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        match path:
            case "/pause":
                self._going.clear()
                self.cut = 2
                self.let_go()
            case "/resume":
                self.cut = None
                self._going.set()
            case "/collective_rpc":
                self._load(Path(body["kwargs"]["weights_path"]))
            case "/update_weight_version":
                self.label = body["new_version"]
            case "/weight_checker":
                rank = "dp0:pp0:pcp0:tp0:"
                sums = {rank + name: hashlib.sha256(data).hexdigest() for name, data in self.weights.items()}
                return {"checksums": sums}
        return {}

    def _load(self, folder: Path) -> None:
        with safe_open(folder / "model.safetensors", "np") as file:
            for name in set(file.keys()) & self.weights.keys() - self.without:
                self.weights[name] = file.get_tensor(name).tobytes()
