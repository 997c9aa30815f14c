from __future__ import annotations

import numpy as np

from consumers.advantages.rewards import EPSILON, Float64, equal


def grpo(rewards_G: Float64) -> Float64:
    """(r - mean) / std over the group: Shao et al., 2024, DeepSeekMath (arXiv:2402.03300), equation 21."""
    centred_G = dr_grpo(rewards_G)
    deviation = float(rewards_G.std())
    return centred_G / (deviation + EPSILON) if deviation > EPSILON else np.zeros_like(centred_G)


def dr_grpo(rewards_G: Float64) -> Float64:
    """r - mean, without the division that favours prompts of little spread: Liu et al., 2025 (arXiv:2503.20783)."""
    if equal(rewards_G):
        return np.zeros_like(rewards_G)
    centred_G: Float64 = rewards_G - rewards_G.mean()
    return centred_G
