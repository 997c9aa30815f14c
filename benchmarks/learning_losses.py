"""A loss that does not know of other policies, to see what the correction is worth."""

from __future__ import annotations

from dataclasses import replace

import torch

from consumers.losses.grpo import grpo
from consumers.losses.tokens import Denominators, LossSettings, LossTokens


def uncorrected(tokens: LossTokens, denominators: Denominators, settings: LossSettings) -> torch.Tensor:
    """`grpo` as if the policy that is trained had sampled every token: its importance ratio is 1 everywhere."""
    return grpo(replace(tokens, old_N=tokens.logprobs_N.detach()), denominators, settings)
