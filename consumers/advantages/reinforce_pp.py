"""REINFORCE++: normalised over the whole batch instead of the group: Hu, 2025 (arXiv:2501.03262)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from consumers.advantages.grpo import dr_grpo
from consumers.advantages.rewards import EPSILON, Float64


def reinforce_pp(groups: Sequence[Float64]) -> list[Float64]:
    """(r - mean) / std over all rollouts of the batch, without a baseline of the group."""
    return _over_deviation(groups, float(np.concatenate(groups).mean()))


def reinforce_pp_baseline(groups: Sequence[Float64]) -> list[Float64]:
    """r minus the mean of the group; then divided by the std of that over all rollouts of the batch.

    The mean of that is 0 already, so that a group of equal rewards has no advantage.
    """
    return _over_deviation([dr_grpo(rewards_G) for rewards_G in groups], 0.0)


def _over_deviation(groups: Sequence[Float64], mean: float) -> list[Float64]:
    """(values - mean) / their standard deviation over all groups."""
    deviation = float(np.concatenate(groups).std())
    if deviation <= EPSILON:
        return [np.zeros_like(values_G) for values_G in groups]
    return [(values_G - mean) / (deviation + EPSILON) for values_G in groups]
