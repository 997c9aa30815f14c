"""Log-probabilities of chosen tokens under the policy, with their gradient, at little memory.

Suffixes: N chosen tokens, V entries of the vocabulary, T tokens of a packed row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from headrace.policy.blocks import Block
from headrace.policy.head import packed_scores

CHUNK = 16
"""Rows of logits that are in float32 at a time: they stay in the cache of a CPU core."""
CHUNK_DEVICE = 1024


def packed_logprobs(
    model: Any,
    token_ids_T: torch.Tensor,
    positions_T: torch.Tensor,
    blocks: Sequence[Block],
    sources_N: torch.Tensor,
    targets_N: torch.Tensor,
    temperature: float,
) -> torch.Tensor:
    """float32 [N]: log-probability of `targets_N` after the tokens at `sources_N` of a packed row (nats).

    Logits are divided by `temperature`, as the sampler does; 0 is greedy, whose log-probs are those of temperature 1.
    """
    scale = temperature or 1.0

    def score(logits_nV: torch.Tensor, targets_n: torch.Tensor) -> torch.Tensor:
        return chosen_logprobs(logits_nV, targets_n, scale)[:, None]

    return packed_scores(model, token_ids_T, positions_T, blocks, sources_N, targets_N, score)[:, 0]


def chosen_logprobs(logits_NV: torch.Tensor, targets_N: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """float32 [N]: log softmax(logits / temperature) at the targets, in float32 whatever the logits' type."""
    result: torch.Tensor = _ChosenLogprobs.apply(logits_NV, targets_N, temperature)  # type: ignore[no-untyped-call]
    return result


class _ChosenLogprobs(torch.autograd.Function):
    """Keeps the logits as they came and one number per row; float32 copies exist for a few rows at a time.

    d logprob / d logit_v = ([v is the target] - softmax_v) / temperature.
    """

    @staticmethod
    def forward(ctx: Any, logits_NV: torch.Tensor, targets_N: torch.Tensor, temperature: float) -> torch.Tensor:
        norms, chosen = [], []
        for logits, targets in zip(*chunks(logits_NV, targets_N), strict=True):
            scaled = logits.float() / temperature
            norms.append(torch.logsumexp(scaled, dim=-1))
            chosen.append(scaled.gather(1, targets[:, None])[:, 0])
        norm_N = torch.cat(norms)
        ctx.save_for_backward(logits_NV, targets_N, norm_N)
        ctx.temperature = temperature
        return torch.cat(chosen) - norm_N

    @staticmethod
    def backward(ctx: Any, grad_N: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits_NV, targets_N, norm_N = ctx.saved_tensors
        scale_N = grad_N / ctx.temperature
        grad_NV = torch.empty_like(logits_NV)
        pieces = zip(*chunks(logits_NV, targets_N, norm_N, scale_N, grad_NV), strict=True)
        for logits, targets, norm, scale, grad in pieces:
            weights = (logits.float() / ctx.temperature).sub_(norm[:, None]).exp_().mul_(-scale[:, None])
            weights.scatter_add_(1, targets[:, None], scale[:, None])
            grad.copy_(weights)
        return grad_NV, None, None


def chunks(*tensors: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    """Each tensor in pieces of so many rows as are in float32 at a time."""
    size = CHUNK if tensors[0].device.type == "cpu" else CHUNK_DEVICE
    return [torch.split(tensor, size) for tensor in tensors]
