"""Losses: pure functions of named tensors, one value per sampled token, with the denominators passed in.

A loss is a sum over tokens divided by numbers of the *whole* batch. Its value and gradient over one big batch
therefore equal the sums over any split into microbatches, and rollouts without advantage can stay away: their
terms are zero, while the denominators still count them.

Every batch is used for one optimizer step, so the policy that the importance ratio compares with is the one that
sampled the token, up to `max_lag` steps older: `r = exp(logprob - behaviour_logprob)`. Both are log-probabilities
of the sampling distribution at its temperature; where top-p or top-k cut the behaviour distribution, its
log-probabilities were renormalised over what was left, so that r is too low by the mass that was cut away.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from headrace.config import TrainerConfig
from headrace.errors import ConfigError
from headrace.objects import load_function


@dataclass(frozen=True, slots=True, eq=False)
class LossTokens:
    """N sampled tokens, those of one rollout beside each other."""

    logprobs_N: torch.Tensor
    """float32, under the policy that is trained; carries the gradient."""
    behaviour_N: torch.Tensor
    """float32, under the policy that sampled."""
    advantages_N: torch.Tensor
    """float32, that of the token's rollout."""
    lengths_N: torch.Tensor
    """float32, number of loss tokens of the token's rollout."""


@dataclass(frozen=True, slots=True)
class Denominators:
    """Numbers of the whole batch, however it is split."""

    rollouts: int
    """Those with a token in the loss."""
    tokens: int
    """Loss tokens of all rollouts."""
    max_tokens: int
    """Most tokens that a rollout may have."""


@dataclass(frozen=True, slots=True)
class LossSettings:
    clip_low: float
    clip_high: float
    importance_cap: float

    @classmethod
    def of(cls, config: TrainerConfig) -> LossSettings:
        return cls(config.clip_low, config.clip_high, config.importance_cap)


Loss = Callable[[LossTokens, Denominators, LossSettings], torch.Tensor]
"""A scalar to be minimised."""


def surrogate(tokens: LossTokens, settings: LossSettings) -> torch.Tensor:
    """Clipped policy objective per token, [N], to be maximised: min(t A, clip(r, 1 - low, 1 + high) A).

    Clipping is that of PPO (Schulman et al., 2017, arXiv:1707.06347, equation 7). t is r truncated at the cap C, in
    the manner of truncated importance sampling (Ionides, 2008; Espeholt et al., 2018, arXiv:1802.01561): its value is
    min(r, C) and its gradient min(r, C) times that of the log-probability, so that a token that the policy likes far
    more than its sampler did, in a bad rollout, pushes with weight C, not with an unbounded one and not with none.
    """
    ratio_N = torch.exp(tokens.logprobs_N - tokens.behaviour_N)
    truncation_N = (settings.importance_cap / ratio_N.detach()).clamp(max=1.0)
    clipped_N = ratio_N.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    return torch.minimum(ratio_N * truncation_N * tokens.advantages_N, clipped_N * tokens.advantages_N)


def grpo(tokens: LossTokens, denominators: Denominators, settings: LossSettings) -> torch.Tensor:
    """Mean over rollouts of the mean over their tokens, without KL: Shao et al., 2024 (arXiv:2402.03300), eq. 3."""
    return -(surrogate(tokens, settings) / tokens.lengths_N).sum() / denominators.rollouts


def dr_grpo(tokens: LossTokens, denominators: Denominators, settings: LossSettings) -> torch.Tensor:
    """Sum over tokens by a constant length, which favours no length: Liu et al., 2025 (arXiv:2503.20783)."""
    return -surrogate(tokens, settings).sum() / (denominators.rollouts * denominators.max_tokens)


LOSSES: dict[str, Loss] = {"grpo": grpo, "dr_grpo": dr_grpo}


def loss(name: str) -> Loss:
    """By name, or one's own as `package.module:object`. Raises ConfigError for an unknown name."""
    if name in LOSSES:
        return LOSSES[name]
    if ":" not in name:
        raise ConfigError(
            f"trainer.loss = {name!r} is not known; use one of {', '.join(LOSSES)} or package.module:object"
        )
    own: Loss = load_function(name, f"trainer.loss = {name!r}", ConfigError)
    return own
