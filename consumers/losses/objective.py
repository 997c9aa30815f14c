"""From what each token gains to a number: correction, KL penalty and entropy bonus, and how tokens are averaged."""

from __future__ import annotations

import torch

from consumers.losses.tokens import Denominators, LossSettings, LossTokens


def objective(gain_N: torch.Tensor, tokens: LossTokens, settings: LossSettings) -> torch.Tensor:
    """[N], to be maximised: w gain - beta KL + c H, with the correction's weight w of each token.

    beta is `kl_coefficient`, c is `entropy_coefficient`, H the entropy of the token's distribution.
    """
    value_N = tokens.weights_N * gain_N
    if tokens.reference_N is not None:
        value_N = value_N - settings.kl_coefficient * reference_kl(tokens.logprobs_N, tokens.reference_N)
    if tokens.entropy_N is not None:
        value_N = value_N + settings.entropy_coefficient * tokens.entropy_N
    return value_N


def reference_kl(logprobs_N: torch.Tensor, reference_N: torch.Tensor) -> torch.Tensor:
    """[N]: q/p - log(q/p) - 1, for the policy p and the reference q at the sampled tokens, in nats.

    An estimate of KL(p, q) that is never negative: Shao et al., 2024 (arXiv:2402.03300), equation 4.
    """
    difference_N = reference_N - logprobs_N
    return torch.exp(difference_N) - difference_N - 1.0


def rollout_mean(value_N: torch.Tensor, tokens: LossTokens, denominators: Denominators) -> torch.Tensor:
    """The mean over rollouts of the mean over their tokens: each rollout counts alike."""
    return (value_N / tokens.lengths_N).sum() / denominators.rollouts


def token_mean(value_N: torch.Tensor, denominators: Denominators) -> torch.Tensor:
    """The mean over all tokens: each token counts alike."""
    return value_N.sum() / denominators.tokens


def rollout_sum_mean(value_N: torch.Tensor, denominators: Denominators) -> torch.Tensor:
    """The mean over rollouts of the sum over their tokens."""
    return value_N.sum() / denominators.rollouts
