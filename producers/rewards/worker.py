"""What runs in a reward's worker process: the environments and the reward, called on one rollout at a time."""

from __future__ import annotations

import asyncio
import inspect
import math
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from broker.messages import TaskKind
from headrace.config import EnvironmentConfig
from headrace.errors import EnvironmentLoadError
from headrace.objects import reason
from producers.environments.api import Environment, Rollout
from producers.environments.registry import Reward, build_environment, load_reward


@dataclass(frozen=True, slots=True)
class Score:
    """What became of one call: a finite reward, or the reason why there is none."""

    reward: float = 0.0
    failure: str = ""
    correct: bool | None = None
    """What the environment says of it, whatever its reward; None where it was not asked."""


@dataclass(frozen=True, slots=True)
class Judge:
    """One environment with the reward that goes with it; `reward` None is the environment's own."""

    environment: Environment
    reward: Reward | None

    @classmethod
    def load(cls, config: EnvironmentConfig) -> Judge:
        """Raises EnvironmentLoadError."""
        return cls(build_environment(config), load_reward(config.reward) if config.reward else None)

    async def __call__(self, rollout: Rollout, kind: TaskKind) -> Score:
        # A verdict that nobody awaited would always count as right.
        correct = bool(await _value(self.environment.correct(rollout)))
        if kind == "eval":
            return Score(float(correct), correct=correct)
        ask = self.reward or self.environment.score
        return replace(judged(await _value(ask(rollout))), correct=correct)


_judges: dict[str, Judge | EnvironmentLoadError] = {}
_runner: asyncio.Runner | None = None


def load(environments: Mapping[str, EnvironmentConfig]) -> None:
    """Called once as the process starts, so that no call's deadline pays for slow imports.

    What does not load fails the calls that need it, each with the reason: an exception here would take the pool down.
    """
    global _runner
    # One event loop for all calls, because a reward may keep connections open between them.
    _runner = asyncio.Runner()
    for name, config in environments.items():
        try:
            _judges[name] = Judge.load(config)
        except EnvironmentLoadError as error:
            _judges[name] = error


def score(name: str, kind: TaskKind, pickled: bytes) -> Score:
    """Score one pickled Rollout: by the reward, or as 1 for right and 0 for wrong in an evaluation."""
    judge = _judges[name]
    if isinstance(judge, EnvironmentLoadError):
        return Score(failure=str(judge))
    assert _runner is not None
    return _runner.run(_score(judge, kind, pickled))


async def _score(judge: Judge, kind: TaskKind, pickled: bytes) -> Score:
    async def call() -> Score:
        return await judge(pickle.loads(pickled), kind)  # noqa: S301 - our own parent process wrote it

    # A task holds its exception as a value, whatever its type. Not every exception survives the way to the parent.
    task = asyncio.ensure_future(call())
    await asyncio.wait({task})
    if task.cancelled():
        return Score(failure="reward was cancelled by its own code")
    error = task.exception()
    return task.result() if error is None else Score(failure=f"reward raised {reason(error)}")


async def _value(given: Any) -> Any:
    """What a user's function gave, by a coroutine or at once."""
    return await given if inspect.isawaitable(given) else given


def judged(value: object) -> Score:
    """A finite number is a reward; anything else is a failure, never a 0."""
    if not isinstance(value, int | float) and not hasattr(value, "__float__"):
        return Score(failure=f"reward returned {type(value).__name__}, not a number")
    reward = float(value)
    return Score(reward) if math.isfinite(reward) else Score(failure=f"reward is {reward}, not a finite number")
