from __future__ import annotations

import torch

from consumers.losses.objective import objective, token_mean
from consumers.losses.ratios import clipped_gain, token_ratio
from consumers.losses.tokens import Denominators, LossSettings, LossTokens


def dual_clip(tokens: LossTokens, denominators: Denominators, settings: LossSettings) -> torch.Tensor:
    """- 1/tokens Σ g, with g = max(min(r A, clip(r) A), c A) where A < 0, else min(r A, clip(r) A); c = `dual_clip`.

    PPO whose loss is bounded also where a bad token has become far likelier: Ye et al., 2019 (arXiv:1912.09729).
    """
    gain_N = clipped_gain(token_ratio(tokens), tokens, settings)
    advantages_N = tokens.advantages_N
    gain_N = torch.where(advantages_N < 0, torch.maximum(gain_N, settings.dual_clip * advantages_N), gain_N)
    return -token_mean(objective(gain_N, tokens, settings), denominators)
