"""Importance ratios, of tokens and of rollouts, and what clipping makes of them."""

from __future__ import annotations

import torch

from consumers.losses.tokens import LossSettings, LossTokens


def token_ratio(tokens: LossTokens) -> torch.Tensor:
    """[N]: r = exp(logprob - old), with gradient."""
    return torch.exp(tokens.logprobs_N - tokens.old_N)


def rollout_ratio(tokens: LossTokens) -> torch.Tensor:
    """[N]: each token has the geometric mean of the ratios of its rollout, with gradient."""
    difference_N = tokens.logprobs_N - tokens.old_N
    return torch.exp(rollout_sum(difference_N, tokens.rollouts_N) / tokens.lengths_N)


def rollout_sum(values_N: torch.Tensor, rollouts_N: torch.Tensor) -> torch.Tensor:
    """[N]: each token has the sum over its rollout."""
    sums_R = values_N.new_zeros(int(rollouts_N.max()) + 1).index_add(0, rollouts_N, values_N)
    return sums_R[rollouts_N]


def clip(ratio_N: torch.Tensor, settings: LossSettings) -> torch.Tensor:
    """[N]: the ratio within 1 - clip_low … 1 + clip_high."""
    return ratio_N.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)


def clipped_gain(ratio_N: torch.Tensor, tokens: LossTokens, settings: LossSettings) -> torch.Tensor:
    """[N]: min(r A, clip(r) A), PPO's pessimistic bound: Schulman et al., 2017 (arXiv:1707.06347), equation 7."""
    return torch.minimum(ratio_N * tokens.advantages_N, clip(ratio_N, settings) * tokens.advantages_N)


def truncated_gain(tokens: LossTokens, settings: LossSettings) -> torch.Tensor:
    """[N]: min(t A, clip(r) A), as `clipped_gain` with t, the ratio r truncated at `importance_cap`, C.

    In the manner of truncated importance sampling (Ionides, 2008; Espeholt et al., 2018, arXiv:1802.01561): the value
    of t is min(r, C) and its gradient min(r, C) times that of the log-probability, so that a token that the policy
    likes far more than its sampler did, in a bad rollout, pushes with weight C, not with an unbounded one and not with
    none.
    """
    ratio_N = token_ratio(tokens)
    truncation_N = (settings.importance_cap / ratio_N.detach()).clamp(max=1.0)
    return torch.minimum(ratio_N * truncation_N * tokens.advantages_N, clip(ratio_N, settings) * tokens.advantages_N)
