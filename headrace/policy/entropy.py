"""Log-probabilities of chosen tokens and entropies of their distributions, with their gradient, at little memory.

As `headrace/policy/logprobs.py`, for an entropy bonus. Suffixes: N chosen tokens, V entries of the vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch

from headrace.policy.logprobs import chunks


def chosen_logprobs_and_entropy(
    logits_NV: torch.Tensor, targets_N: torch.Tensor, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [N] each: log softmax(logits / temperature) at the targets, and the entropy of that softmax (nats)."""
    logprobs_N, entropy_N = _Both.apply(logits_NV, targets_N, temperature)  # type: ignore[no-untyped-call]
    return logprobs_N, entropy_N


class _Both(torch.autograd.Function):
    """Keeps the logits as they came and two numbers per row; float32 copies exist for a few rows at a time.

    With z = logits / temperature, p = softmax(z) and the entropy H: d logprob / d z_v = [v is the target] - p_v, and
    d H / d z_v = -p_v (log p_v + H).
    """

    @staticmethod
    def forward(
        ctx: Any, logits_NV: torch.Tensor, targets_N: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        norms, chosen, entropies = [], [], []
        for logits, targets in zip(*chunks(logits_NV, targets_N), strict=True):
            scaled = logits.float() / temperature
            norm = torch.logsumexp(scaled, dim=-1)
            norms.append(norm)
            chosen.append(scaled.gather(1, targets[:, None])[:, 0] - norm)
            entropies.append(torch.special.entr(scaled.sub_(norm[:, None]).exp_()).sum(dim=-1))
        norm_N, entropy_N = torch.cat(norms), torch.cat(entropies)
        ctx.save_for_backward(logits_NV, targets_N, norm_N, entropy_N)
        ctx.temperature = temperature
        return torch.cat(chosen), entropy_N

    @staticmethod
    def backward(ctx: Any, chosen_N: torch.Tensor, bonus_N: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits_NV, targets_N, norm_N, entropy_N = ctx.saved_tensors
        chosen_N, bonus_N = chosen_N / ctx.temperature, bonus_N / ctx.temperature
        grad_NV = torch.empty_like(logits_NV)
        columns = (logits_NV, targets_N, norm_N, entropy_N, chosen_N, bonus_N, grad_NV)
        for logits, targets, norm, entropy, chosen, bonus, grad in zip(*chunks(*columns), strict=True):
            p = (logits.float() / ctx.temperature).sub_(norm[:, None]).exp_()
            # -p log p is entr(p), which is 0 where p is.
            weights = torch.special.entr(p).mul_(bonus[:, None])
            weights.sub_(p.mul_((chosen + bonus * entropy)[:, None]))
            weights.scatter_add_(1, targets[:, None], chosen[:, None])
            grad.copy_(weights)
        return grad_NV, None, None
