"""Off-policy correction: what weight a token has that another policy than the step's first one sampled.

With w = p_start / p_behaviour of a token, its rollout's product W, and its rollout's geometric mean w':

    correction = "token"      min(w, cap)        biased, of little variance
    correction = "sequence"   min(W, cap)        unbiased up to the cap, of large variance on long rollouts
    mask = "token"            0 where w is outside mask_low … mask_high, else 1
    mask = "sequence"         0 where w' is outside, else 1

Both factors are multiplied, and neither has a gradient. Truncation is that of Ionides (2008) and of Espeholt et al.,
2018 (arXiv:1802.01561). Denominators count masked tokens, which makes them weights of 0, not another mean.
"""

from __future__ import annotations

import torch

from consumers.losses.ratios import rollout_sum
from consumers.losses.tokens import LossSettings


def correction(
    start_N: torch.Tensor,
    behaviour_N: torch.Tensor,
    rollouts_N: torch.Tensor,
    lengths_N: torch.Tensor,
    settings: LossSettings,
) -> torch.Tensor:
    """Weights [N], from the log-probs under the policy that begins the step and under the one that sampled."""
    difference_N = (start_N - behaviour_N).detach()
    weights_N = torch.ones_like(difference_N)
    if settings.correction == "ratio" and settings.mask == "off":
        return weights_N
    if settings.correction == "token":
        weights_N = torch.exp(difference_N).clamp(max=settings.importance_cap)
    elif settings.correction == "sequence":
        weights_N = torch.exp(rollout_sum(difference_N, rollouts_N)).clamp(max=settings.importance_cap)
    if settings.mask == "off":
        return weights_N
    if settings.mask == "sequence":
        difference_N = rollout_sum(difference_N, rollouts_N) / lengths_N
    ratio_N = torch.exp(difference_N)
    kept_N = (ratio_N >= settings.mask_low) & (ratio_N <= settings.mask_high)
    return weights_N * kept_N
