"""Groups that wait to be published at the same moment leave in one script: those that end together are sent together.

    who              waits for                 woken by
    publish          the answer to its group   the sending, which has it or the error
    the sending      Redis's answers           itself; it ends when nothing waits, and the next group begins anew

There is no timer: what comes while a script is under way goes with the next one. Only callers add to what waits, one
group each, and stay for the answer: a producer that plays n tasks has at most n here.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from broker.bounds import KEEP_PUBLISHED
from broker.redis.link import Link, text
from headrace.errors import HeadraceError, WireError

MOST_GROUPS = 32
MOST_BYTES = 2 << 20
"""Of one script, so that none keeps Redis for long. One group may have more."""


@dataclass(slots=True, eq=False)
class _Waiting:
    """One group, and the future of its answer."""

    producer: str
    names: tuple[Any, ...]
    """Entry id of the task, task id, attempt, kind."""
    encode: Callable[[], bytes]
    answer: asyncio.Future[str]
    body: bytes = b""
    """Once it was encoded, which no group has to nothing."""

    def ready(self) -> bool:
        """Whether it can leave: somebody waits for it, and it is encoded."""
        if not self.answer.done() and not self.body:
            try:
                self.body = self.encode()
            except WireError as error:
                self.end(error)
        return not self.answer.done()

    def end(self, error: BaseException) -> None:
        """No answer comes any more."""
        if isinstance(error, asyncio.CancelledError):
            self.answer.cancel()
        elif not self.answer.done():
            self.answer.set_exception(error)


class Outbox:
    """Groups of one producer process on their way out."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._waiting: deque[_Waiting] = deque()
        self._sending: asyncio.Task[None] | None = None

    async def publish(self, producer: str, names: tuple[Any, ...], encode: Callable[[], bytes]) -> str:
        """What the script answers for this group. Raises what `Link.script` does, and `encode`.

        Groups are encoded when they leave, one right after the other: code that has just run is quicker.
        """
        waiting = _Waiting(producer, names, encode, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        if self._sending is None:
            self._sending = asyncio.create_task(self._send_all(), name="outbox")
        return await waiting.answer

    async def close(self) -> None:
        """Whoever still waits is cancelled, which ends the sending even where its own cancellation is lost."""
        for waiting in self._waiting:
            waiting.answer.cancel()
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.wait([self._sending])

    async def _send_all(self) -> None:
        batch: list[_Waiting] = []
        try:
            while batch := self._next():
                await self._send(batch)
        except BaseException as error:
            for waiting in (*batch, *self._waiting):
                waiting.end(error)
            self._waiting.clear()
            raise
        finally:
            self._sending = None

    async def _send(self, batch: list[_Waiting]) -> None:
        groups = [part for waiting in batch for part in (*waiting.names, waiting.body)]
        try:
            answers = await self._link.script("publish", batch[0].producer, KEEP_PUBLISHED, *groups)
        except HeadraceError as error:
            for waiting in batch:
                waiting.end(error)
            return
        for waiting, answer in zip(batch, answers, strict=True):
            if not waiting.answer.done():
                waiting.answer.set_result(text(answer))

    def _next(self) -> list[_Waiting]:
        """The oldest that fit into one script; whoever was cancelled meanwhile is left out."""
        batch: list[_Waiting] = []
        nbytes = 0
        while self._waiting and len(batch) < MOST_GROUPS:
            first = self._waiting[0]
            if batch and first.producer != batch[0].producer:
                break
            if not first.ready():
                self._waiting.popleft()
                continue
            if batch and nbytes + len(first.body) > MOST_BYTES:
                break
            batch.append(self._waiting.popleft())
            nbytes += len(first.body)
        return batch
