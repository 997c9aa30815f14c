from __future__ import annotations

import torch

from consumers.losses.objective import objective, rollout_mean
from consumers.losses.ratios import truncated_gain
from consumers.losses.tokens import Denominators, LossSettings, LossTokens


def grpo(tokens: LossTokens, denominators: Denominators, settings: LossSettings) -> torch.Tensor:
    """- 1/rollouts Σ_i 1/|o_i| Σ_t [min(min(r, C) A, clip(r, 1 - low, 1 + high) A) - beta KL].

    Shao et al., 2024, DeepSeekMath (arXiv:2402.03300), equation 3, with the ratio truncated at C = `importance_cap`.
    """
    return -rollout_mean(objective(truncated_gain(tokens, settings), tokens, settings), tokens, denominators)
