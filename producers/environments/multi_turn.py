"""The episode of most games: a prompt, and a reply to each completion until there is nothing more to say."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from producers.environments.api import Done, Message, Observation, Turn

Reply = Observation | Done | str
"""Text is shown as a user's message."""


class MultiTurn:
    """Shows `prompt` as a user's message, then what `reply` says to each turn, until that is `Done`.

    `reply` is called once per turn, in order, and may be a coroutine function; what an episode remembers is its own.
    """

    def __init__(
        self, prompt: str, answer: Any, reply: Callable[[Turn], Reply | Awaitable[Reply]], *, system: str = ""
    ) -> None:
        self._answer, self._reply = answer, reply
        messages = (Message("user", prompt),)
        self._observation = Observation((Message("system", system), *messages) if system else messages)

    @property
    def answer(self) -> Any:
        return self._answer

    async def reset(self) -> Observation:
        return self._observation

    async def step(self, turn: Turn) -> Observation | Done:
        given = self._reply(turn)
        reply = await given if inspect.isawaitable(given) else given
        return Observation((Message("user", reply),)) if isinstance(reply, str) else reply

    async def close(self) -> None:
        return None
