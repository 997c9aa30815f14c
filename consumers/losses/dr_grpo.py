from __future__ import annotations

import torch

from consumers.losses.objective import objective
from consumers.losses.ratios import truncated_gain
from consumers.losses.tokens import Denominators, LossSettings, LossTokens


def dr_grpo(tokens: LossTokens, denominators: Denominators, settings: LossSettings) -> torch.Tensor:
    """- 1/(rollouts · max_tokens) Σ_i Σ_t min(min(r, C) A, clip(r, 1 - low, 1 + high) A).

    A sum over tokens by a constant length, which favours no length: Liu et al., 2025 (arXiv:2503.20783).
    """
    value_N = objective(truncated_gain(tokens, settings), tokens, settings)
    return -value_N.sum() / (denominators.rollouts * denominators.max_tokens)
