"""Advantages: how much better than its group, or its batch, a rollout was. Pure functions of rewards."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from consumers.advantages.grpo import dr_grpo, grpo
from consumers.advantages.reinforce_pp import reinforce_pp, reinforce_pp_baseline
from consumers.advantages.rewards import Float64
from consumers.advantages.rloo import rloo
from headrace.errors import ConfigError
from headrace.objects import load_function

GroupAdvantage = Callable[[Float64], Float64]
"""Rewards of the G members of a group to their advantages, [G] to [G]."""

Advantage = Callable[[Sequence[Float64]], list[Float64]]
"""The same of all groups of a batch."""


def by_group(advantage: GroupAdvantage) -> Advantage:
    """Each group for itself."""
    return lambda groups: [advantage(rewards_G) for rewards_G in groups]


ADVANTAGES: dict[str, Advantage] = {
    "grpo": by_group(grpo),
    "dr_grpo": by_group(dr_grpo),
    "rloo": by_group(rloo),
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
}


def advantage(name: str) -> Advantage:
    """By name, or one's own of a group as `package.module:object`. Raises ConfigError."""
    if name in ADVANTAGES:
        return ADVANTAGES[name]
    return by_group(load_function(name, f"trainer.advantage = {name!r}", ConfigError, ADVANTAGES))
