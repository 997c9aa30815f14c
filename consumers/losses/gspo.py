from __future__ import annotations

import torch

from consumers.losses.objective import objective, rollout_mean
from consumers.losses.ratios import clipped_gain, rollout_ratio
from consumers.losses.tokens import Denominators, LossSettings, LossTokens


def gspo(tokens: LossTokens, denominators: Denominators, settings: LossSettings) -> torch.Tensor:
    """- 1/rollouts Σ_i min(s_i A_i, clip(s_i, 1 - low, 1 + high) A_i), s_i = (Π_t r_t)^(1/|o_i|).

    One ratio of the whole rollout, the geometric mean over its tokens: Zheng et al., 2025 (arXiv:2507.18071).
    """
    gain_N = clipped_gain(rollout_ratio(tokens), tokens, settings)
    return -rollout_mean(objective(gain_N, tokens, settings), tokens, denominators)
