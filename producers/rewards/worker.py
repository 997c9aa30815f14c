"""One environment with its rewards, as a worker process calls them, and what becomes of a call."""

from __future__ import annotations

import inspect
import math
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from broker.messages import TaskKind
from headrace.config import OWN_REWARD, EnvironmentConfig, RewardConfig
from headrace.errors import EnvironmentLoadError
from headrace.objects import reason
from producers.environments.api import Environment, Rollout
from producers.environments.registry import build_environment
from producers.rewards.registry import load_reward, parts_of


@dataclass(frozen=True, slots=True)
class Score:
    """What became of one rollout: a finite reward, or the reason why there is none."""

    reward: float = 0.0
    failure: str = ""
    correct: bool | None = None
    """What the environment says of it, whatever its reward; None where it was not asked."""
    parts: dict[str, float] = field(default_factory=dict)
    """Of a weighted sum: the value of each part by its name, before it is weighted."""


@dataclass(frozen=True, slots=True)
class Call:
    """One question to a worker. Its answer has one Score for each rollout."""

    kind: TaskKind
    part: int | None
    """Which of the environment's rewards; None for none, as in an evaluation."""
    verdict: bool
    """Whether to ask the environment if the rollout is correct."""
    group: bool
    """Whether the reward is asked once for all rollouts; else there is one rollout."""
    count: int
    rollouts: bytes
    """A pickled list of `count` Rollouts."""


@dataclass(frozen=True, slots=True)
class Judge:
    """An environment and its rewards. A reward that did not load fails the calls that need it."""

    environment: Environment
    rewards: tuple[Any, ...]
    """Functions, or the error why there is none; None for a service."""

    @classmethod
    def load(cls, config: EnvironmentConfig) -> Judge:
        """Raises EnvironmentLoadError when the environment does not load."""
        environment = build_environment(config)
        return cls(environment, tuple(_loaded(part, environment) for part in parts_of(config)))

    async def __call__(self, call: Call) -> list[Score]:
        """Raises whatever the user's code does."""
        rollouts: list[Rollout] = pickle.loads(call.rollouts)  # noqa: S301 - our own parent process wrote it
        reward: Any = None if call.part is None else self.rewards[call.part]
        if isinstance(reward, EnvironmentLoadError):
            return [Score(failure=str(reward))] * call.count
        if call.group:
            return group_judged(await _value(reward(rollouts)), call.count)
        # A verdict that nobody awaited would always count as right.
        correct = bool(await _value(self.environment.correct(rollouts[0]))) if call.verdict else None
        if reward is None:
            return [Score(float(bool(correct)) if call.kind == "eval" else 0.0, correct=correct)]
        return [replace(judged(await _value(reward(rollouts[0]))), correct=correct)]


def judged(value: object) -> Score:
    """A finite number is a reward; anything else is a failure, never a 0."""
    if not isinstance(value, int | float) and not hasattr(value, "__float__"):
        return Score(failure=f"reward returned {type(value).__name__}, not a number")
    try:
        reward = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        return Score(failure=f"reward returned {type(value).__name__} that is no finite number ({reason(error)})")
    return Score(reward) if math.isfinite(reward) else Score(failure=f"reward is {reward}, not a finite number")


def added(score: Score, more: Score) -> Score:
    """The sum of what a rollout gets by itself and of what it gets relative to its group."""
    if more.failure:
        return replace(more, correct=score.correct)
    total = judged(score.reward + more.reward)
    return replace(total, correct=score.correct, parts={**score.parts, **more.parts})


def group_judged(values: Any, count: int) -> list[Score]:
    """One finite number for each member, in their order; anything else fails them all."""
    if hasattr(values, "tolist"):
        values = values.tolist()
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        return [Score(failure=f"reward returned {type(values).__name__}, not a list of {count} numbers")] * count
    if len(values) != count:
        return [Score(failure=f"reward returned {len(values)} numbers for a group of {count}")] * count
    scores = [judged(value) for value in values]
    # What is relative to the others has no meaning where one is missing.
    failure = next((score.failure for score in scores if score.failure), "")
    return [Score(failure=failure)] * count if failure else scores


def _loaded(part: RewardConfig, environment: Environment) -> Any:
    if part.is_service:
        return None
    try:
        return environment.score if part.name == OWN_REWARD else load_reward(part.name)
    except EnvironmentLoadError as error:
        return error


async def _value(given: Any) -> Any:
    """What a user's function gave, by a coroutine or at once."""
    return await given if inspect.isawaitable(given) else given
