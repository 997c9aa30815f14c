"""A completion server of our own, for the engine "openai": a user's server that may lack what the engine needs.

Its model: at each place the likeliest token is `prompt length % 8`, by 1.5 in the logits; all others are equal.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field, fields
from types import TracebackType
from typing import Any

from aiohttp import web

VOCABULARY = 8
LEAD = 1.5


@dataclass
class Lacks:
    """What it does otherwise than the engine needs."""

    ids: bool = False
    """Neither `token_ids` nor tokens named by id."""
    logprobs: bool = False
    prompts: bool = False
    """It refuses prompts of token ids."""
    begin: bool = False
    """It puts a token before the prompt."""
    stops: bool = False
    """It passes stop_token_ids over."""
    raw: bool = False
    """Its log-probs are those at temperature 1, before top-k and top-p."""


@dataclass
class CompletionServer:
    """`fail`: completions are answered with this status. `hang`: they are not answered, until `let_go`; nor, where
    `most` is set, are those that come after so many. `cut`: they end with "abort" after so many tokens."""

    lacks: Lacks = field(default_factory=Lacks)
    models: tuple[tuple[str, int | None], ...] = (("tiny", 64),)
    key: str = ""
    fail: int = 0
    hang: bool = False
    most: int | None = None
    cut: int | None = None
    ids_as_names: bool = True
    paths: tuple[str, ...] = ()
    """What it says that its routes are."""
    url: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)
    """Bodies of completions, in order."""
    open: int = 0
    _let: asyncio.Event = field(default_factory=asyncio.Event)

    async def __aenter__(self) -> CompletionServer:
        app = web.Application()
        self._routes(app)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def _routes(self, app: web.Application) -> None:
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/openapi.json", self._openapi)
        app.router.add_post("/v1/completions", self._complete)

    def let_go(self) -> None:
        self.hang = False
        self._let.set()
        self._let = asyncio.Event()

    async def close(self) -> None:
        """Connections drop. Idempotent."""
        await self._runner.cleanup()

    async def _models(self, request: web.Request) -> web.Response:
        cards = [{"id": name} | ({"max_model_len": length} if length else {}) for name, length in self.models]
        return web.json_response({"object": "list", "data": cards})

    async def _openapi(self, request: web.Request) -> web.Response:
        return web.json_response({"paths": {path: {} for path in self.paths}})

    async def _complete(self, request: web.Request) -> web.Response:
        self.open += 1
        try:
            if self.hang or (self.most is not None and len(self.asked) >= self.most):
                await self._let.wait()
            if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
                return web.json_response({"error": {"message": "wrong key"}}, status=401)
            body = await request.json()
            self.asked.append(body)
            if self.fail:
                return web.json_response({"error": {"message": "out of order"}}, status=self.fail)
            if self.lacks.prompts:
                return web.json_response({"error": {"message": "prompt must be a string"}}, status=400)
            return web.json_response(self._completion(body))
        finally:
            self.open -= 1

    def _completion(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt = ([0] if self.lacks.begin else []) + body["prompt"]
        ids: list[int] = []
        logprobs: list[float] = []
        tops: list[dict[str, float]] = []
        reason = "length"
        most = body["max_tokens"]
        if self.cut is not None and self.cut < most:
            most, reason = self.cut, "abort"
        while len(ids) < most:
            likeliest = (len(prompt) + len(ids)) % VOCABULARY
            row = self._row(likeliest, body)
            ids.append(likeliest)
            logprobs.append(row[likeliest])
            best = sorted(row, key=row.__getitem__, reverse=True)[: max(1, body["logprobs"])]
            tops.append({f"token_id:{token}": row[token] for token in best})
            if likeliest in body["stop_token_ids"] and not self.lacks.stops:
                reason = "stop"
                break
        named = [f"token_id:{token}" if self.ids_as_names and not self.lacks.ids else chr(97 + token) for token in ids]
        choice: dict[str, Any] = {"index": 0, "text": "?", "finish_reason": reason}
        choice["stop_reason"] = ids[-1] if reason == "stop" else None
        if not self.lacks.logprobs:
            choice["logprobs"] = {"tokens": named, "token_logprobs": logprobs, "top_logprobs": tops}
        if not self.lacks.ids:
            choice |= {"token_ids": ids, "prompt_token_ids": prompt}
        return {"choices": [choice], "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}}

    def _row(self, likeliest: int, body: dict[str, Any]) -> dict[int, float]:
        """Log-prob of each token that may be sampled."""
        processed = not self.lacks.raw and body["temperature"] > 0
        temperature = body["temperature"] if processed else 1.0
        logits = {token: (LEAD if token == likeliest else 0.0) / temperature for token in range(VOCABULARY)}
        if processed and (body["top_k"] == 1 or body["top_p"] < 0.1):
            return {likeliest: 0.0}
        norm = math.log(sum(math.exp(logit) for logit in logits.values()))
        return {token: logit - norm for token, logit in logits.items()}


def everything() -> set[str]:
    """The names of what a server may lack."""
    return {one.name for one in fields(Lacks)}
