"""The environment and reward seams.

A dataset of an environment is a `Environment`: it makes single-use `Episode`s. An episode gives its first
prompt, then after each completion either the next observation or the end, with a reward or "to be scored".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message; the tokenizer's chat template turns messages into tokens."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Observation:
    """What the model sees next."""

    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Done:
    """The episode is over. `reward` None means: to be scored by the reward."""

    reward: float | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """One completion as the environment sees it."""

    text: str
    finish_reason: str


@dataclass(frozen=True, slots=True)
class Rollout:
    """What a reward scores: one finished episode."""

    environment: str
    index: int
    prompt: str
    """Text of all messages before the first completion."""
    completion: str
    """Text of the last completion."""
    turns: tuple[Turn, ...]
    answer: Any
    """Whatever the episode knows about the right answer (picklable)."""
    finish_reason: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


class Episode(Protocol):
    """Single use. Members of a group each play an episode of their own, made with the same index and seed."""

    @property
    def answer(self) -> Any: ...

    async def reset(self) -> Observation: ...

    async def step(self, turn: Turn) -> Observation | Done: ...

    async def close(self) -> None: ...


class Environment(Protocol):
    """A source of episodes. `split` is "train" or "eval"; the two share no prompt."""

    def __len__(self) -> int:
        """Number of training indices; tasks draw from range(len)."""
        ...

    def eval_size(self) -> int:
        """Number of held-out indices; 0 when there are none."""
        ...

    def episode(self, split: str, index: int, seed: int) -> Episode: ...

    async def score(self, rollout: Rollout) -> float:
        """The environment's own reward."""
        ...

    def correct(self, rollout: Rollout) -> bool:
        """Whether the rollout counts as right, whatever its reward: the accuracy of steps and evaluations."""
        ...
