"""Code that asks an OpenAI-style client for completions, played as an episode: its control turned inside out.

    the code's task                       the rollout's task
    client.chat.completions.create()  →   reset() or step() returns the new messages as an Observation
              ↑                                      ↓ tokens are sampled, ids and log-probs kept
    its answer                        ←   step(turn)

The code waits for `step`, `end` or `cut`; `reset` and `step` wait for its next request or for its end. The client is
the real one of the package `openai`; what answers it is in this process, and no byte goes over a network.

Exact to the token: the conversation is carried as ids by the rollout, so each request must go on from the one before.
One that does not (a message changed, left out, or put in between) ends the rollout with the reason.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
import openai

from producers.environments.api import Done, Observation, Turn
from producers.environments.calls import RolloutFailed
from producers.environments.openai_messages import NotText, completion, message_of, observed, retold, said

UNANSWERABLE = ("response_format", "logit_bias", "functions", "guided_json", "guided_regex")
"""Parameters that change what is sampled in ways that the log-probs of the run would not know."""
UNTRAINABLE = "environment asks for what cannot be trained on"
FULL = "this model's maximum context length is reached"
"""How servers say that a conversation can go no further."""


@dataclass(frozen=True, slots=True)
class _Request:
    body: Mapping[str, Any]
    answer: asyncio.Future[httpx.Response]


class Bridge:
    """One conversation: `run` is started with a client, and what it asks is answered by `step`.

    `trouble` is the first thing that was wrong with a request.
    """

    def __init__(self, run: Callable[[openai.AsyncOpenAI], Awaitable[Any]]) -> None:
        self._run = run
        self._requests: asyncio.Queue[_Request] = asyncio.Queue()
        self._open: _Request | None = None
        self._told: list[Mapping[str, Any]] = []
        """All messages so far, as they are compared."""
        self._tools: list[Any] = []
        self._task: asyncio.Task[Any] | None = None
        self._full = False
        self.trouble = ""

    async def reset(self) -> Observation:
        """Start it and wait for its first request. Raises RolloutFailed when it asks none."""
        # The transport that calls a function. No proxy, no certificates: nothing is connected to.
        http = httpx.AsyncClient(transport=httpx.MockTransport(self._answer), trust_env=False)
        client = openai.AsyncOpenAI(api_key="none", base_url="http://headrace/v1", max_retries=0, http_client=http)
        self._task = asyncio.create_task(_awaited(self._run, client))
        shown = await self._next()
        if isinstance(shown, Done):
            raise RolloutFailed("environment ended before it asked for a completion")
        return shown

    async def step(self, turn: Turn) -> Observation | Done:
        """Answer its request and wait for the next one, or for its end."""
        assert self._open is not None
        answer = completion(turn, self._tools)
        self._told.append(retold(answer["choices"][0]["message"]))
        self._reply(httpx.Response(200, json=answer))
        return await self._next()

    async def cut(self) -> None:
        """Tell it that the context is full, and wait for its end. Raises RolloutFailed when it goes on all the same."""
        self._full = True
        error = {"message": FULL, "type": "invalid_request_error", "code": "context_length_exceeded"}
        self._reply(httpx.Response(400, json={"error": error}))
        await self._next()

    @property
    def open(self) -> bool:
        """Whether a request waits for its answer."""
        return self._open is not None

    def result(self) -> Any:
        """What the code returned. Raises RolloutFailed."""
        assert self._task is not None
        if self.trouble:
            raise RolloutFailed(self.trouble)
        if self._task.cancelled():
            raise RolloutFailed("environment cancelled its own rollout")
        return self._task.result()  # what it raised is named where the environment is asked

    async def close(self) -> None:
        """Stop it where it still runs, and wait until it has cleaned up."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait({self._task})
        if self._task is not None and not self._task.cancelled():
            self._task.exception()  # seen

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        """What the client calls. A request that ends the rollout has no answer: its code might ask again for ever."""
        asked = _Request(json.loads(request.content or b"{}"), asyncio.get_running_loop().create_future())
        if self._full:
            self.trouble = self.trouble or "environment goes on asking after it was told that the context is full"
        elif reason := self._refused(request.url.path, asked.body):
            self.trouble = self.trouble or f"{UNTRAINABLE}: {reason}"
        else:
            self._open = asked
        self._requests.put_nowait(asked)
        return await asked.answer

    def _refused(self, path: str, body: Mapping[str, Any]) -> str:
        if not path.endswith("/chat/completions"):
            return f"{path} instead of /chat/completions"
        if self._open is not None:
            return "several completions at the same time, in one rollout"
        if body.get("n") not in (None, 1) or body.get("stream"):
            return (
                f"n = {body.get('n') or 1} and stream = {bool(body.get('stream'))}; only one whole completion is given"
            )
        named = [name for name in UNANSWERABLE if body.get(name) is not None]
        return f"parameters {', '.join(named)}" if named else ""

    async def _next(self) -> Observation | Done:
        assert self._task is not None
        asked = asyncio.create_task(self._requests.get())
        try:
            await asyncio.wait({asked, self._task}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            asked.cancel()
        if self.trouble:
            raise RolloutFailed(self.trouble)
        if not asked.done() or asked.cancelled():
            return Done()
        return self._observed(asked.result().body)

    def _observed(self, body: Mapping[str, Any]) -> Observation:
        """The messages that are new in a request. Raises RolloutFailed when it is not the same conversation."""
        given, tools = body.get("messages"), body.get("tools") or []
        try:
            messages = [retold(message) for message in given] if isinstance(given, list) else []
            new = said(self._told, messages)
        except NotText as error:
            raise RolloutFailed(f"{UNTRAINABLE}: {error}") from error
        if self._told and tools != self._tools:
            raise RolloutFailed("environment changes its tools in the middle of a conversation")
        self._tools = tools
        shown = observed([message_of(message, messages) for message in new], tools, first=not self._told)
        self._told = messages
        return shown

    def _reply(self, response: httpx.Response) -> None:
        assert self._open is not None
        answer, self._open = self._open.answer, None
        if not answer.done():
            answer.set_result(response)


async def _awaited(run: Callable[[openai.AsyncOpenAI], Awaitable[Any]], client: openai.AsyncOpenAI) -> Any:
    async with client:
        return await run(client)
