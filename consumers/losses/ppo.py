from __future__ import annotations

import torch

from consumers.losses.objective import objective, token_mean
from consumers.losses.ratios import clipped_gain, token_ratio
from consumers.losses.tokens import Denominators, LossSettings, LossTokens


def ppo(tokens: LossTokens, denominators: Denominators, settings: LossSettings) -> torch.Tensor:
    """- 1/tokens Σ min(r A, clip(r, 1 - low, 1 + high) A), without a critic.

    Schulman et al., 2017 (arXiv:1707.06347), equation 7. REINFORCE++ (Hu, 2025, arXiv:2501.03262) is this loss with an
    advantage of its own.
    """
    return -token_mean(objective(clipped_gain(token_ratio(tokens), tokens, settings), tokens, settings), denominators)
