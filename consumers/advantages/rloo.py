from __future__ import annotations

from consumers.advantages.grpo import dr_grpo
from consumers.advantages.rewards import Float64


def rloo(rewards_G: Float64) -> Float64:
    """r minus the mean of the other members: Ahmadian et al., 2024 (arXiv:2402.14740).

    This is (r - mean) G / (G - 1). A group of one has none to compare with, and no advantage.
    """
    return dr_grpo(rewards_G) * (rewards_G.size / max(1, rewards_G.size - 1))
