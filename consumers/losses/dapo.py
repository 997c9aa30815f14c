from __future__ import annotations

import torch

from consumers.losses.ppo import ppo
from consumers.losses.tokens import Denominators, LossSettings, LossTokens


def dapo(tokens: LossTokens, denominators: Denominators, settings: LossSettings) -> torch.Tensor:
    """- 1/tokens Σ min(r A, clip(r, 1 - low, 1 + high) A) with high > low.

    PPO's bound as a mean over all tokens of the batch, whose upper clip is the wider one, so that unlikely tokens of
    good rollouts can grow: Yu et al., 2025 (arXiv:2503.14476). Its overlong shaping and dynamic sampling are
    `trainer.overlong_buffer` and `trainer.dynamic_sampling`.
    """
    return ppo(tokens, denominators, settings)
