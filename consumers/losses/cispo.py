from __future__ import annotations

import torch

from consumers.losses.objective import objective, token_mean
from consumers.losses.ratios import clip, token_ratio
from consumers.losses.tokens import Denominators, LossSettings, LossTokens


def cispo(tokens: LossTokens, denominators: Denominators, settings: LossSettings) -> torch.Tensor:
    """- 1/tokens Σ sg(clip(r, 1 - low, 1 + high)) A log p, sg without gradient.

    The ratio's weight is clipped and not the token's update, so that every token keeps its gradient: MiniMax, 2025
    (arXiv:2506.13585).
    """
    weight_N = clip(token_ratio(tokens).detach(), settings)
    gain_N = weight_N * tokens.advantages_N * tokens.logprobs_N
    return -token_mean(objective(gain_N, tokens, settings), denominators)
