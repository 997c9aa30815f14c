from __future__ import annotations

import torch

from consumers.losses.ppo import ppo
from consumers.losses.tokens import Denominators, LossSettings, LossTokens


def decoupled_ppo(tokens: LossTokens, denominators: Denominators, settings: LossSettings) -> torch.Tensor:
    """- 1/tokens Σ w min(u A, clip(u, 1 - low, 1 + high) A), u = p / p_start, w = min(p_start / p_behaviour, C).

    PPO whose trust region is around the policy that begins the step, the proximal one, and not around the older ones
    that sampled, for which the weights w account: Hilton et al., 2021 (arXiv:2110.00641); Fu et al., 2025
    (arXiv:2505.24298). C is `importance_cap`. While a step is one update (`trainer.minibatches`), u is 1.
    """
    return ppo(tokens, denominators, settings)
