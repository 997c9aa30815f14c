"""The environment and reward seams.

A dataset of an environment is a `Environment`: it makes single-use `Episode`s. An episode gives its first
prompt, then after each completion either the next observation or the end, with a reward or "to be scored".

The reward of a rollout is the sum of what its observations carried, each for the turn before, and of the final reward:
what `Done` says, else what the environment's `score` gives. A reward that the run names replaces that sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that the model wrote."""

    name: str
    arguments: Mapping[str, Any]
    call_id: str = ""
    """Nine letters and digits, which some chat templates insist on; the same whenever the rollout is played again."""
    text_values: bool = False
    """The arguments' values are text, as formats without types have it: the tool's own types say what they mean."""
    error: str = ""
    """Why this is no call that could be made, in words for the model; empty when it is one."""


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message; the tokenizer's chat template turns messages into tokens."""

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    """Of role "assistant"."""
    tool_call_id: str = ""
    """Of role "tool": the call whose result this is."""
    name: str = ""
    """Of role "tool": the tool."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What the model sees next."""

    messages: tuple[Message, ...]
    reward: float = 0.0
    """Of the turn before; the first observation has none."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Schemas of the tools that the model may call (`producers/environments/tools.py`). The first observation's count,
    for the whole episode."""


@dataclass(frozen=True, slots=True)
class Done:
    """The episode is over. `reward` is the final one; None means: to be scored by the reward."""

    reward: float | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """One completion as the environment sees it."""

    text: str
    finish_reason: str
    tool_calls: tuple[ToolCall, ...] = ()
    """What the model called in it, in order; always empty in an episode without tools."""
    reward: float = 0.0
    """What the observation after it carried; known only once that has come."""


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
    """Of the last completion; "length" also where a limit on turns or tokens ended the episode."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    given: float | None = None
    """The final reward that the episode gave itself (`Done`); None where it left that to be scored."""


class Episode(Protocol):
    """Single use. Members of a group each play an episode of their own, made with the same index and seed.

    `reset` is called once. After it `close` is called once, however the episode ends: also when it raises, is too slow,
    is cancelled, or loses its engine. A limit of the run may end an episode between two turns.
    """

    @property
    def answer(self) -> Any: ...

    async def reset(self) -> Observation: ...

    async def step(self, turn: Turn) -> Observation | Done: ...

    async def close(self) -> None: ...


class Environment(Protocol):
    """A source of episodes. `split` is "train" or "eval"; the two share no prompt.

    It may have `setup()` and `teardown()` besides, coroutine functions or plain ones: see
    `producers/environments/lifetime.py`.
    """

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
