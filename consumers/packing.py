"""Packing: a group's rollouts share their longest common prefix, and groups share microbatches.

A group becomes a block [prefix | suffix 1 | … | suffix n]: the prefix is computed once, each suffix sees the prefix
and itself, and its positions go on where the prefix ends. Blocks lie beside each other in one row per microbatch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from broker.messages import Trajectory
from headrace.policy.blocks import Block
from headrace.version import PolicyVersion

Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
Bool = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One microbatch: T packed tokens, of which N targets enter the loss."""

    token_ids_T: Int64
    positions_T: Int64
    blocks: tuple[Block, ...]
    sources_N: Int64
    """Index into T of the token whose hidden state predicts the target."""
    targets_N: Int64
    """Token id of the target."""
    behaviour_N: Float32
    advantages_N: Float32
    lengths_N: Float32
    """Loss tokens of the target's rollout."""
    rollouts_N: Int64
    """Which rollout of the row the target is of, from 0. All loss tokens of a rollout are in one row."""
    current_N: Bool
    """Whether the version that is trained sampled the target, over keys and values of its own."""

    @property
    def is_filling(self) -> bool:
        """It is of no rollout, and changes nothing: `FILLING`."""
        return not self.lengths_N.any()


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One rollout that enters the backward pass."""

    trajectory: Trajectory
    advantage: float


def pack(groups: Iterable[Sequence[Sample]], token_budget: int, trained: PolicyVersion | None = None) -> list[Row]:
    """Rows of at most `token_budget` tokens, filled in order; a larger block is split between its rollouts.

    A single rollout over the budget has a row of its own; none is ever split. Samples whose loss mask is empty are left
    out. `trained` is the version that is trained.
    """
    rows: list[Row] = []
    blocks: list[tuple[int, Sequence[Sample]]] = []
    used = 0
    for group in groups:
        for prefix, samples in split(trainable(group), token_budget):
            length = block_length(prefix, samples)
            if blocks and used + length > token_budget:
                rows.append(_row(blocks, trained))
                blocks, used = [], 0
            blocks.append((prefix, samples))
            used += length
    if blocks:
        rows.append(_row(blocks, trained))
    return rows


FILLING = Row(
    token_ids_T=np.zeros(2, np.int64),
    positions_T=np.arange(2),
    blocks=(Block(0, 0, (2,)),),
    sources_N=np.zeros(1, np.int64),
    targets_N=np.zeros(1, np.int64),
    behaviour_N=np.zeros(1, np.float32),
    advantages_N=np.zeros(1, np.float32),
    lengths_N=np.zeros(1, np.float32),
    rollouts_N=np.zeros(1, np.int64),
    current_N=np.zeros(1, np.bool_),
)
"""What a rank computes while others have one row more: a collective needs all of them."""


def pack_shares(
    groups: Sequence[Sequence[Sample]], token_budget: int, ranks: int, trained: PolicyVersion | None = None
) -> list[list[Row]]:
    """The same for each rank, equally many rows of each. Groups are whole, and of nearly as many tokens on each.

    No group in which something is to be trained is no row at all, on every rank.
    """
    if ranks == 1:
        return [pack(groups, token_budget, trained)]
    sizes = [sum(block_length(*block) for block in split(trainable(group), token_budget)) for group in groups]
    shares = [pack((groups[i] for i in share), token_budget, trained) for share in balanced(sizes, ranks)]
    most = max(map(len, shares))
    return [rows + [FILLING] * (most - len(rows)) for rows in shares]


def balanced(sizes: Sequence[int], shares: int) -> list[list[int]]:
    """Indices into `sizes`, so many ascending lists, by Graham's rule: the largest goes where the least is."""
    found: list[list[int]] = [[] for _ in range(shares)]
    loads = [0] * shares
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        least = min(range(shares), key=lambda share: (loads[share], len(found[share])))
        found[least].append(i)
        loads[least] += sizes[i]
    return [sorted(share) for share in found]


def trainable(samples: Sequence[Sample]) -> list[Sample]:
    """Those that have a target; nothing predicts the first token."""
    return [sample for sample in samples if sample.trajectory.loss_mask_T[1:].any()]


def split(samples: Sequence[Sample], token_budget: int) -> list[tuple[int, Sequence[Sample]]]:
    """(prefix length, samples) of the blocks of one group, halved until each fits or holds one rollout."""
    if not samples:
        return []
    prefix = shared_prefix([sample.trajectory for sample in samples])
    if len(samples) == 1 or block_length(prefix, samples) <= token_budget:
        return [(prefix, samples)]
    half = len(samples) // 2
    return split(samples[:half], token_budget) + split(samples[half:], token_budget)


def block_length(prefix: int, samples: Sequence[Sample]) -> int:
    return prefix + sum(sample.trajectory.token_ids_T.size - prefix for sample in samples)


def shared_prefix(trajectories: Sequence[Trajectory]) -> int:
    """Tokens that all begin with. No loss target is among them, and each suffix has at least one token."""
    first = trajectories[0]
    limit = min(int(np.argmax(trajectory.loss_mask_T)) for trajectory in trajectories)
    limit = min(limit, *(trajectory.token_ids_T.size - 1 for trajectory in trajectories))
    for trajectory in trajectories[1:]:
        differs = np.flatnonzero(first.token_ids_T[:limit] != trajectory.token_ids_T[:limit])
        limit = int(differs[0]) if differs.size else limit
    return limit


def _row(blocks: list[tuple[int, Sequence[Sample]]], trained: PolicyVersion | None) -> Row:
    tokens: list[npt.NDArray[np.int32]] = []
    positions: list[Int64] = []
    targets: list[tuple[npt.NDArray[Any], ...]] = []
    places: list[Block] = []
    at = 0
    for prefix, samples in blocks:
        tokens.append(samples[0].trajectory.token_ids_T[:prefix])
        positions.append(np.arange(prefix))
        start = at + prefix
        for sample in samples:
            suffix_ids = sample.trajectory.token_ids_T[prefix:]
            tokens.append(suffix_ids)
            positions.append(np.arange(prefix, prefix + suffix_ids.size))
            targets.append(_targets(sample, prefix, at, start) + _origin(sample, len(targets), trained))
            start += suffix_ids.size
        places.append(Block(at, prefix, tuple(s.trajectory.token_ids_T.size - prefix for s in samples)))
        at = start
    sources_N, targets_N, behaviour_N, advantages_N, lengths_N, rollouts_N, current_N = (
        np.concatenate(column) for column in zip(*targets, strict=True)
    )
    return Row(
        token_ids_T=np.concatenate(tokens).astype(np.int64),
        positions_T=np.concatenate(positions).astype(np.int64),
        blocks=tuple(places),
        sources_N=sources_N.astype(np.int64),
        targets_N=targets_N.astype(np.int64),
        behaviour_N=behaviour_N.astype(np.float32),
        advantages_N=advantages_N.astype(np.float32),
        lengths_N=lengths_N.astype(np.float32),
        rollouts_N=rollouts_N.astype(np.int64),
        current_N=current_N,
    )


def _targets(sample: Sample, prefix: int, at: int, start: int) -> tuple[npt.NDArray[Any], ...]:
    """Columns of one rollout's loss tokens; its block begins at `at`, its suffix at `start`."""
    trajectory = sample.trajectory
    chosen = _chosen(trajectory)
    before = chosen - 1
    return (
        np.where(before < prefix, at + before, start + before - prefix),
        trajectory.token_ids_T[chosen],
        trajectory.logprobs_T[chosen],
        np.full(chosen.size, sample.advantage),
        np.full(chosen.size, chosen.size),
    )


def _origin(sample: Sample, number: int, trained: PolicyVersion | None) -> tuple[npt.NDArray[Any], ...]:
    """More columns of the same tokens: the rollout's number in its row, whether the trained version sampled them."""
    trajectory = sample.trajectory
    current_T = np.zeros(trajectory.loss_mask_T.size, np.bool_)
    for span in trajectory.spans:
        current_T[span.start : span.end] = span.version == trained and span.kv == "fresh"
    current_N = current_T[_chosen(trajectory)]
    return np.full(current_N.size, number), current_N


def _chosen(trajectory: Trajectory) -> npt.NDArray[np.intp]:
    """Places of a rollout's loss tokens; nothing predicts the first token."""
    chosen = np.flatnonzero(trajectory.loss_mask_T)
    return chosen[chosen > 0]
