"""A group as a structure of arrays: what the codec writes, what validation looks at, all trajectories end to end.

Encoding, decoding and checking then cost a fixed number of numpy calls per group, whatever its size.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from broker.messages import Bool, FinishReason, Float32, Group, Int32, KvState, Outcome, TaskKind, Trajectory, VersionSpan
from headrace.errors import WireError
from headrace.version import PolicyVersion

FINISH: tuple[FinishReason, ...] = ("stop", "length", "abort")
KV: tuple[KvState, ...] = ("kept", "fresh")
CORRECT: tuple[bool | None, ...] = (False, True, None)

Scalar = TypeVar("Scalar", bound=np.generic)
Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class FlatGroup:
    """N trajectories with T tokens together, of which M were sampled, in S version spans and R mask runs."""

    task_id: str
    attempt: int
    kind: TaskKind
    environment: str
    index: int
    producer: str
    failures: tuple[str, ...]
    outcome: Outcome
    error: str
    stopped_N: tuple[int, ...]
    seconds: dict[str, float]
    lengths_N: Int64
    token_ids_T: Int32
    logprobs_M: Float32
    """Only of sampled tokens."""
    mask_runs_R: Int64
    """Lengths of runs of equal mask, the first of them not sampled (and perhaps empty)."""
    span_counts_N: Int64
    spans_S5: Int64
    """start, end, incarnation, step, index into KV; positions count from the trajectory's first token."""
    rewards_N: Float64
    finish_N: Int64
    """Index into FINISH."""
    correct_N: Int64
    """Index into CORRECT."""


def flatten(group: Group) -> FlatGroup:
    """Raises WireError when arrays of one trajectory differ in length."""
    members = group.trajectories
    for number, member in enumerate(members):
        tokens, logprobs, mask = len(member.token_ids_T), len(member.logprobs_T), len(member.loss_mask_T)
        if not tokens == logprobs == mask:
            raise WireError(
                f"group of task {group.task_id}: trajectory {number} has {tokens} token ids, {logprobs} log-probs "
                f"and a loss mask of {mask}; all must have one entry per token"
            )
    mask_T = _joined([member.loss_mask_T for member in members], np.bool_)
    logprobs_T = _joined([member.logprobs_T for member in members], np.float32)
    spans = [
        (span.start, span.end, span.version.incarnation, span.version.step, KV.index(span.kv))
        for member in members
        for span in member.spans
    ]
    return FlatGroup(
        task_id=group.task_id,
        attempt=group.attempt,
        kind=group.kind,
        environment=group.environment,
        index=group.index,
        producer=group.producer,
        failures=group.failures,
        outcome=group.outcome,
        error=group.error,
        stopped_N=group.stopped_N,
        seconds=group.seconds,
        lengths_N=np.array([len(member.token_ids_T) for member in members], np.int64),
        token_ids_T=_joined([member.token_ids_T for member in members], np.int32),
        logprobs_M=logprobs_T[mask_T],
        mask_runs_R=runs_of(mask_T),
        span_counts_N=np.array([len(member.spans) for member in members], np.int64),
        spans_S5=np.array(spans, np.int64).reshape(-1, 5),
        rewards_N=np.array([member.reward for member in members], np.float64),
        finish_N=np.array([FINISH.index(member.finish_reason) for member in members], np.int64),
        correct_N=np.array([CORRECT.index(member.correct) for member in members], np.int64),
    )


def unflatten(flat: FlatGroup) -> Group:
    """The inverse of `flatten`. The flat group must be valid (see `broker/validate.py`)."""
    mask_T = mask_of(flat.mask_runs_R)
    logprobs_T = np.zeros(len(mask_T), np.float32)
    logprobs_T[mask_T] = flat.logprobs_M
    token_bounds = [0, *np.cumsum(flat.lengths_N).tolist()]
    span_bounds = [0, *np.cumsum(flat.span_counts_N).tolist()]
    spans = [
        VersionSpan(start, end, PolicyVersion(incarnation, step), KV[kv])
        for start, end, incarnation, step, kv in flat.spans_S5.tolist()
    ]
    rewards, finish, correct = flat.rewards_N.tolist(), flat.finish_N.tolist(), flat.correct_N.tolist()
    trajectories = tuple(
        Trajectory(
            token_ids_T=flat.token_ids_T[start:end],
            logprobs_T=logprobs_T[start:end],
            loss_mask_T=mask_T[start:end],
            spans=tuple(spans[span_bounds[n] : span_bounds[n + 1]]),
            reward=rewards[n],
            finish_reason=FINISH[finish[n]],
            correct=CORRECT[correct[n]],
        )
        for n, (start, end) in enumerate(pairwise(token_bounds))
    )
    return Group(
        task_id=flat.task_id,
        attempt=flat.attempt,
        kind=flat.kind,
        environment=flat.environment,
        index=flat.index,
        producer=flat.producer,
        trajectories=trajectories,
        failures=flat.failures,
        outcome=flat.outcome,
        error=flat.error,
        stopped_N=flat.stopped_N,
        seconds=flat.seconds,
    )


def runs_of(mask_T: Bool) -> Int64:
    """Run lengths of a mask, the first run being of False: [F, F, T] is [2, 1], [T] is [0, 1], [] is []."""
    if not len(mask_T):
        return np.zeros(0, np.int64)
    changes = np.flatnonzero(mask_T[1:] != mask_T[:-1]) + 1
    bounds = np.concatenate(([0], [0] if mask_T[0] else [], changes, [len(mask_T)]))
    return np.diff(bounds).astype(np.int64)


def mask_of(runs_R: Int64) -> Bool:
    """The inverse of `runs_of`; a run that is negative raises ValueError."""
    return np.repeat(np.arange(len(runs_R)) % 2 == 1, runs_R)


def sampled_before(runs_R: Int64, positions_P: Int64) -> Int64:
    """How many tokens before each position are sampled, from the runs alone: a group has far fewer runs than tokens."""
    bounds = np.concatenate(([0], np.cumsum(runs_R)))
    odd_R = np.arange(len(runs_R)) % 2
    sampled_at_bounds = np.concatenate(([0], np.cumsum(runs_R * odd_R)))
    run_P = np.searchsorted(bounds[1:-1], positions_P, side="right")
    sampled_P: Int64 = sampled_at_bounds[run_P] + (positions_P - bounds[run_P]) * odd_R[run_P]
    return sampled_P


def _joined(arrays: list[npt.NDArray[Scalar]], dtype: type[Scalar]) -> npt.NDArray[Scalar]:
    return np.concatenate(arrays).astype(dtype, copy=False) if arrays else np.zeros(0, dtype)
