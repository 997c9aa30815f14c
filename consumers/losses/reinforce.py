from __future__ import annotations

import torch

from consumers.losses.objective import objective, rollout_sum_mean
from consumers.losses.ratios import token_ratio
from consumers.losses.tokens import Denominators, LossSettings, LossTokens


def reinforce(tokens: LossTokens, denominators: Denominators, settings: LossSettings) -> torch.Tensor:
    """- 1/rollouts Σ_i A_i Σ_t sg(min(r_t, C)) log p_t, sg without gradient, C = `importance_cap`.

    The policy gradient of whole rollouts, without clipping (Williams, 1992), which RLOO uses with its leave-one-out
    advantage: Ahmadian et al., 2024 (arXiv:2402.14740). The truncated ratio accounts for another policy's sampling.
    """
    weight_N = token_ratio(tokens).detach().clamp(max=settings.importance_cap)
    gain_N = weight_N * tokens.advantages_N * tokens.logprobs_N
    return -rollout_sum_mean(objective(gain_N, tokens, settings), denominators)
