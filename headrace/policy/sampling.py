"""The behaviour distribution: what tokens are sampled from, as pure functions of logits.

Suffixes: B rows of the batch, V entries of the vocabulary. Per-row settings are numpy arrays, because deciding
which rows need which work must not cost a device operation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

BLOCK = 256
"""Entries per block of the inverse CDF."""
CANDIDATES = 1024
"""Top-p looks at this many best tokens first; a flatter distribution is sorted whole."""

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RowSettings:
    """Sampling settings of B rows."""

    temperature_B: Floats
    """0 is greedy; log-probs are then those of temperature 1, and top-p and top-k do not count."""
    top_p_B: Floats
    top_k_B: Ints
    """0 is off."""

    @property
    def plain(self) -> bool:
        """Every row samples from the model's own distribution."""
        return bool((self.temperature_B == 1).all() and (self.top_p_B >= 1).all() and (self.top_k_B == 0).all())


def behaviour_logits(logits_BV: torch.Tensor, rows: RowSettings) -> torch.Tensor:
    """[B, V], unnormalised: its softmax is the distribution sampled from; what is cut away is -inf.

    float32, but for rows that all sample from the model's own distribution: they come back as they are.

    Temperature first, then top-k, then top-p over what top-k left, as in transformers' order of warpers.
    Ties at the top-k border all stay.
    """
    if rows.plain:
        return logits_BV
    logits_BV = logits_BV.float()
    greedy_B = rows.temperature_B == 0
    temperature_B = np.where(greedy_B, 1.0, rows.temperature_B)
    if (temperature_B != 1).any():
        divisor_B1 = torch.as_tensor(temperature_B, dtype=torch.float32, device=logits_BV.device)[:, None]
        logits_BV = logits_BV / divisor_B1
    top_k_B = np.where(greedy_B, 0, rows.top_k_B)
    top_p_B = np.where(greedy_B, 1.0, rows.top_p_B)
    cut = np.flatnonzero((top_k_B > 0) | (top_p_B < 1))
    if cut.size:
        logits_BV = logits_BV.clone()  # the caller's logits stay as they are
    for row in cut:
        _cut_top_k(logits_BV[row], int(top_k_B[row]))
        _cut_top_p(logits_BV[row], float(top_p_B[row]))
    return logits_BV


def behaviour_logprobs(logits_BV: torch.Tensor, rows: RowSettings) -> torch.Tensor:
    """float32 [B, V]: log-probabilities of the distribution sampled from (nats)."""
    return torch.log_softmax(behaviour_logits(logits_BV, rows), dim=-1, dtype=torch.float32)


def sample(
    logits_BV: torch.Tensor, rows: RowSettings, uniforms_B: Floats
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """One token per row and its log-probability under the distribution sampled from.

    `uniforms_B` in [0, 1) decides alone which token it is: the inverse of the cumulative distribution, found by
    block sums first and inside one block then (`torch.multinomial` takes twenty times as long).
    """
    probs_BV = torch.softmax(behaviour_logits(logits_BV, rows), dim=-1, dtype=torch.float32)
    tokens_B = _inverse_cdf(probs_BV, uniforms_B)
    greedy_B = rows.temperature_B == 0
    if greedy_B.any():
        tokens_B = torch.where(torch.as_tensor(greedy_B, device=tokens_B.device), probs_BV.argmax(dim=-1), tokens_B)
    logprobs_B = probs_BV.gather(1, tokens_B[:, None])[:, 0].log_()
    return tokens_B.cpu().numpy(), logprobs_B.cpu().numpy()


def uniforms(seeds_B: npt.NDArray[np.uint64], positions_B: npt.NDArray[np.uint64]) -> Floats:
    """Numbers in [0, 1) that depend on (seed, position) alone: splitmix64 (Steele et al., 2014) over a mixed counter.

    A request's random numbers are therefore the same whatever else is in the batch.
    """
    with np.errstate(over="ignore"):
        state_B = _splitmix64(seeds_B.astype(np.uint64)) + positions_B.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        return (_splitmix64(state_B) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _splitmix64(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    state = state + np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def _inverse_cdf(probs_BV: torch.Tensor, uniforms_B: Floats) -> torch.Tensor:
    """Tokens (int64 [B]) at `uniforms_B` of the cumulative distribution; never one without probability."""
    batch, vocabulary = probs_BV.shape
    blocks = -(-vocabulary // BLOCK)
    if blocks * BLOCK != vocabulary:
        probs_BV = torch.nn.functional.pad(probs_BV, (0, blocks * BLOCK - vocabulary))
    probs_BNK = probs_BV.view(batch, blocks, BLOCK)
    ends_BN = probs_BNK.sum(dim=-1).double().cumsum(dim=-1)
    below_one_B = np.minimum(uniforms_B, 1 - 2.0**-50)  # the product must not round up to the sum
    target_B1 = torch.as_tensor(below_one_B, device=probs_BV.device)[:, None] * ends_BN[:, -1:]
    block_B1 = torch.searchsorted(ends_BN, target_B1, right=True).clamp_(max=blocks - 1)
    before_B1 = torch.where(block_B1 > 0, ends_BN.gather(1, (block_B1 - 1).clamp_(min=0)), 0.0)
    inside_BK = probs_BNK.gather(1, block_B1[:, :, None].expand(-1, -1, BLOCK))[:, 0].double()
    ends_BK = inside_BK.cumsum(dim=-1)
    # Rounding may put the target at or past the block's end, or on an entry without
    # probability: take the last one that has some.
    last_B1 = (inside_BK > 0).long().mul_(torch.arange(BLOCK, device=inside_BK.device)).amax(dim=-1, keepdim=True)
    within_B1 = torch.searchsorted(ends_BK, target_B1 - before_B1, right=True)
    return (block_B1 * BLOCK + torch.minimum(within_B1, last_B1))[:, 0]


def _cut_top_k(logits_V: torch.Tensor, top_k: int) -> None:
    if 0 < top_k < logits_V.shape[0]:
        border = logits_V.topk(top_k).values[-1]
        logits_V.masked_fill_(logits_V < border, float("-inf"))


def _cut_top_p(logits_V: torch.Tensor, top_p: float) -> None:
    """Keep the smallest set of best tokens with at least `top_p` of the mass (Holtzman et al., 2020)."""
    if top_p >= 1:
        return
    total = torch.logsumexp(logits_V, dim=-1)
    for count in (min(CANDIDATES, logits_V.shape[0]), logits_V.shape[0]):
        best_K = logits_V.topk(count).values
        mass_K = torch.exp(best_K - total).cumsum(dim=-1)
        if count == logits_V.shape[0] or float(mass_K[-1]) >= top_p:
            kept = min(int((mass_K < top_p).sum()), count - 1)
            logits_V.masked_fill_(logits_V < best_K[kept], float("-inf"))
            return
