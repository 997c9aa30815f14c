"""Rewards by name: what is built in, and what users name as their own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from headrace.config import OWN_REWARD, EnvironmentConfig, RewardConfig
from headrace.errors import EnvironmentLoadError
from headrace.objects import load_function
from producers.environments.api import Rollout

Reward = Callable[[Rollout], Awaitable[float] | float]
"""A coroutine function or a plain one; it runs in a worker process and may block."""
GroupReward = Callable[[list[Rollout]], Awaitable[Sequence[float]] | Sequence[float]]
"""The same for all members of a group at once; one number for each, in their order."""


def load_reward(name: str) -> Reward | GroupReward:
    """A built-in reward, or one that the user names. Raises EnvironmentLoadError when it does not load."""
    reward: Reward | GroupReward
    if name in BUILT_IN:
        reward = BUILT_IN[name]()
    else:
        reward = load_function(name, f"reward {name!r}", EnvironmentLoadError, (*BUILT_IN, OWN_REWARD))
    return reward


def check_rewards(environment: EnvironmentConfig) -> None:
    """Load what workers will load. Raises EnvironmentLoadError."""
    for part in environment.reward:
        if part.name != OWN_REWARD and not part.is_service:
            load_reward(part.name)


def parts_of(environment: EnvironmentConfig) -> tuple[RewardConfig, ...]:
    """The summands of an environment's reward; without any, its own is the only one."""
    return environment.reward or (RewardConfig(name=OWN_REWARD),)


def _math_verify() -> Any:
    from producers.rewards.mathematics import load

    return load()


BUILT_IN: dict[str, Callable[[], Any]] = {"math_verify": _math_verify}
"""Name to a function that imports and returns the reward."""
