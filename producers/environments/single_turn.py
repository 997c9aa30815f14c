"""The episode that most environments need: one prompt, one completion, then the reward."""

from __future__ import annotations

from typing import Any

from producers.environments.api import Done, Message, Observation, Turn


class SingleTurn:
    """Shows `prompt` as a user's message and ends after the first completion, to be scored."""

    def __init__(self, prompt: str, answer: Any, *, system: str = "") -> None:
        self._prompt, self._answer = prompt, answer
        messages = (Message("user", prompt),)
        self._observation = Observation((Message("system", system), *messages) if system else messages)

    @property
    def prompt(self) -> str:
        return self._prompt

    @property
    def answer(self) -> Any:
        return self._answer

    async def reset(self) -> Observation:
        return self._observation

    async def step(self, turn: Turn) -> Observation | Done:
        return Done()

    async def close(self) -> None:
        return None
