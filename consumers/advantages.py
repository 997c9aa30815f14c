"""Advantages: how much better than its group a rollout was. Pure functions of one group's rewards."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from headrace.errors import ConfigError
from headrace.objects import load_function

Float64 = npt.NDArray[np.float64]

Advantage = Callable[[Float64], Float64]
"""Rewards of the G members of a group to their advantages, [G] to [G]."""

EPSILON = 1e-6
"""Added to the standard deviation; spreads below it are noise of floating point, not a preference."""


def grpo(rewards_G: Float64) -> Float64:
    """(r - mean) / std over the group: Shao et al., 2024, DeepSeekMath (arXiv:2402.03300), equation 21."""
    centred_G = dr_grpo(rewards_G)
    deviation = float(rewards_G.std())
    return centred_G / (deviation + EPSILON) if deviation > EPSILON else np.zeros_like(centred_G)


def dr_grpo(rewards_G: Float64) -> Float64:
    """r - mean, without the division that favours prompts of little spread: Liu et al., 2025 (arXiv:2503.20783)."""
    if float(np.ptp(rewards_G)) <= EPSILON:
        return np.zeros_like(rewards_G)
    centred_G: Float64 = rewards_G - rewards_G.mean()
    return centred_G


ADVANTAGES: dict[str, Advantage] = {"grpo": grpo, "dr_grpo": dr_grpo}


def advantage(name: str) -> Advantage:
    """By name, or one's own as `package.module:object`. Raises ConfigError for an unknown name."""
    if name in ADVANTAGES:
        return ADVANTAGES[name]
    if ":" not in name:
        raise ConfigError(
            f"trainer.advantage = {name!r} is not known; use one of {', '.join(ADVANTAGES)} or package.module:object"
        )
    own: Advantage = load_function(name, f"trainer.advantage = {name!r}", ConfigError)
    return own
