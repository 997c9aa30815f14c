"""Commands that wait at the same moment leave in one pipeline: groups that end together are sent together.

    who              waits for                     woken by
    send             the answer to its command     the sending, which has it or the error
    the sending      Redis's answers               itself; it ends when nobody waits, and the next command begins anew

There is no timer: what comes while a pipeline is under way forms the next one. Nobody but the callers adds to what
waits, one command each, so a process that plays n tasks has at most n here.
"""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial
from typing import Any

from redis.exceptions import RedisError

from broker.redis.link import Link
from headrace.errors import HeadraceError

MOST_COMMANDS = 32
MOST_BYTES = 8 << 20
"""Of one pipeline, so that none keeps Redis, or an answer, for long. One command may have more."""


class Outbox:
    """Commands of one link, each of which is harmless to repeat."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._waiting: deque[_Waiting] = deque()
        self._sending: asyncio.Task[None] | None = None

    async def send(self, command: tuple[Any, ...], nbytes: int) -> Any:
        """The answer, or the errors of `Link.send`; `nbytes` is about how long the command is."""
        waiting = _Waiting(command, nbytes)
        self._waiting.append(waiting)
        if self._sending is None:
            self._sending = asyncio.create_task(self._send_all(), name="outbox")
        answer = await waiting.answer
        if isinstance(answer, RedisError):
            # Only this one was refused: by itself it is tried again, or fails with its sentence.
            return await self._link.send(*command)
        return answer

    async def close(self) -> None:
        """Whoever still waits is cancelled, which ends the sending even where its own cancellation is lost."""
        for waiting in self._waiting:
            waiting.answer.cancel()
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.wait([self._sending])

    async def _send_all(self) -> None:
        """Consumes what waits until there is nothing."""
        batch: list[_Waiting] = []
        try:
            while batch := self._next():
                commands = [waiting.command for waiting in batch]
                try:
                    answers = await self._link.call(partial(self._link.connection.execute_each, commands))
                except HeadraceError as error:
                    answers = [error] * len(batch)
                for waiting, answer in zip(batch, answers, strict=True):
                    waiting.answered(answer)
        finally:
            self._sending = None
            for waiting in (*batch, *self._waiting):
                waiting.answer.cancel()
            self._waiting.clear()

    def _next(self) -> list[_Waiting]:
        """The oldest that fit into one pipeline; whoever was cancelled meanwhile is left out."""
        batch: list[_Waiting] = []
        nbytes = 0
        while self._waiting and len(batch) < MOST_COMMANDS:
            if batch and nbytes + self._waiting[0].nbytes > MOST_BYTES:
                break
            waiting = self._waiting.popleft()
            if not waiting.answer.done():
                batch.append(waiting)
                nbytes += waiting.nbytes
        return batch


class _Waiting:
    """One command and the future of its answer."""

    def __init__(self, command: tuple[Any, ...], nbytes: int) -> None:
        self.command = command
        self.nbytes = nbytes
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def answered(self, answer: Any) -> None:
        if self.answer.done():
            return
        if isinstance(answer, HeadraceError):
            self.answer.set_exception(answer)
        else:
            self.answer.set_result(answer)
