"""Calls into environments, which are somebody's own code: bounded in time, whatever they raise or leave behind."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

from headrace.errors import ServiceError
from headrace.objects import reason

MOST_LEFT = 4096
"""Calls that may go on after they were cancelled; one that is merely about to end counts, too."""


class RolloutFailed(Exception):
    """This rollout has no sample to give. Its text is the reason."""


class Calls:
    """All calls of one producer. A call that takes longer than `deadline_s` fails its rollout."""

    def __init__(self, deadline_s: float, most_left: int = MOST_LEFT) -> None:
        self._deadline_s = deadline_s
        self._most_left = most_left
        self._left: set[asyncio.Task[Any]] = set()

    @property
    def left(self) -> int:
        """Calls that were cancelled and have not ended."""
        return len(self._left)

    async def ask(
        self, whom: str, call: Callable[[], Any], within_s: float | None = None, goodbye_s: float = 0.0
    ) -> Any:
        """What the environment answers, by a coroutine or at once. `whom` names it where it blocks everything.

        When this is cancelled, the call has `goodbye_s` left to end by itself before it is cancelled, too.
        Raises RolloutFailed when it raises, whatever it is, or takes too long; ServiceError when too many calls never
        end.
        """
        if len(self._left) > self._most_left:
            raise ServiceError(f"{len(self._left)} calls of {whom} and others go on although they were cancelled")
        deadline_s = self._deadline_s if within_s is None else min(within_s, self._deadline_s)
        # A task holds its exception as a value, whatever its type.
        task = asyncio.create_task(_answer(call), name=whom)
        try:
            done, _ = await asyncio.wait({task}, timeout=deadline_s)
        except asyncio.CancelledError:
            if goodbye_s:
                await asyncio.wait({task}, timeout=goodbye_s)
            raise
        finally:
            self._cancel(task)
        if not done:
            raise RolloutFailed(f"environment took longer than {deadline_s:g} s")
        if task.cancelled():
            raise RolloutFailed("environment cancelled its own call")
        error = task.exception()
        if isinstance(error, RolloutFailed):
            raise error
        if error is not None:
            raise RolloutFailed(f"environment raised {reason(error)}") from error
        return task.result()

    def _cancel(self, task: asyncio.Task[Any]) -> None:
        if task.cancel():
            self._left.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._left.discard(task)
        if not task.cancelled():
            task.exception()  # seen: nobody asks for it any more


async def _answer(call: Callable[[], Any]) -> Any:
    try:
        value = call()
        return await value if inspect.isawaitable(value) else value
    except SystemExit as error:
        # A task would not keep this one as a value: it would end the process.
        raise RolloutFailed(f"environment raised {reason(error)}") from error
