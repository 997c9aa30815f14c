"""A group as a structure of arrays: what the codec writes, what validation looks at, all trajectories end to end.

The numbers of tokens lie in two numpy arrays. What a group has few of (lengths, runs, spans) is plain Python: for
some dozens of numbers that costs less than one numpy call.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from broker.messages import Bool, FinishReason, Float32, Group, KvState, Outcome, TaskKind, Trajectory, VersionSpan
from headrace.errors import WireError
from headrace.version import PolicyVersion

FINISH: tuple[FinishReason, ...] = ("stop", "length", "abort")
KV: tuple[KvState, ...] = ("kept", "fresh")
CORRECT: tuple[bool | None, ...] = (False, True, None)
LONG_RUN = 64
"""Tokens; from this mean length on, runs are copied one by one, below they are gathered through the mask."""

Scalar = TypeVar("Scalar", bound=np.generic)
Ints = Sequence[int]


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
    lengths_N: Ints
    token_ids_T: npt.NDArray[Any]
    """Of any integer type."""
    logprobs_M: Float32
    """Only of sampled tokens."""
    mask_runs_R: Ints
    """Lengths of runs of equal mask, the first of them not sampled (and perhaps empty)."""
    span_counts_N: Ints
    spans_5S: Ints
    """start, end, incarnation, step, index into KV of each; positions count from the trajectory's first token."""
    rewards_N: Sequence[float]
    finish_N: Ints
    """Index into FINISH."""
    correct_N: Ints
    """Index into CORRECT."""


def flatten(group: Group) -> FlatGroup:
    """Raises WireError when arrays of one trajectory differ in length."""
    members = group.trajectories
    lengths = [len(member.token_ids_T) for member in members]
    for number, (tokens, member) in enumerate(zip(lengths, members, strict=True)):
        logprobs, mask = len(member.logprobs_T), len(member.loss_mask_T)
        if not tokens == logprobs == mask:
            raise WireError(
                f"group of task {group.task_id}: trajectory {number} has {tokens} token ids, {logprobs} log-probs "
                f"and a loss mask of {mask}; all must have one entry per token"
            )
    mask_T = _joined([member.loss_mask_T for member in members], np.bool_)
    runs = runs_of(mask_T)
    spans = [
        number
        for member in members
        for span in member.spans
        for number in (span.start, span.end, *span.version, KV.index(span.kv))
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
        lengths_N=lengths,
        token_ids_T=_joined([member.token_ids_T for member in members], np.int32),
        logprobs_M=gathered(_joined([member.logprobs_T for member in members], np.float32), mask_T, runs),
        mask_runs_R=runs,
        span_counts_N=[len(member.spans) for member in members],
        spans_5S=spans,
        rewards_N=[member.reward for member in members],
        finish_N=[FINISH.index(member.finish_reason) for member in members],
        correct_N=[CORRECT.index(member.correct) for member in members],
    )


def unflatten(flat: FlatGroup) -> Group:
    """The inverse of `flatten`. The flat group must be valid (see `broker/validate.py`)."""
    token_ids_T = flat.token_ids_T.astype(np.int32, copy=False)
    logprobs_T, mask_T = scattered(flat.logprobs_M, flat.mask_runs_R)
    spans = _spans(flat.spans_5S)
    trajectories = tuple(
        Trajectory(
            token_ids_T=token_ids_T[start:end],
            logprobs_T=logprobs_T[start:end],
            loss_mask_T=mask_T[start:end],
            spans=tuple(spans[first:last]),
            reward=reward,
            finish_reason=FINISH[finish],
            correct=CORRECT[correct],
        )
        for (start, end), (first, last), reward, finish, correct in zip(
            pairwise(accumulate(flat.lengths_N, initial=0)),
            pairwise(accumulate(flat.span_counts_N, initial=0)),
            flat.rewards_N,
            flat.finish_N,
            flat.correct_N,
            strict=True,
        )
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


def runs_of(mask_T: Bool) -> list[int]:
    """Run lengths of a mask, the first run being of False: [F, F, T] is [2, 1], [T] is [0, 1], [] is []."""
    if not len(mask_T):
        return []
    changes = (np.flatnonzero(mask_T[1:] != mask_T[:-1]) + 1).tolist()
    bounds = [0, 0] if mask_T[0] else [0]
    return [end - start for start, end in pairwise((*bounds, *changes, len(mask_T)))]


def mask_of(runs_R: Ints) -> Bool:
    """The inverse of `runs_of`; a run that is negative raises ValueError."""
    return np.repeat(np.arange(len(runs_R)) % 2 == 1, runs_R)


def sampled_runs(runs_R: Ints) -> Iterator[tuple[int, int]]:
    """Start and end of each run of True that is not empty."""
    for start, end in [*pairwise(accumulate(runs_R, initial=0))][1::2]:
        if start < end:
            yield start, end


def gathered(values_T: npt.NDArray[Scalar], mask_T: Bool, runs_R: Ints) -> npt.NDArray[Scalar]:
    """The values where the mask, whose runs these are, is True."""
    if len(runs_R) * LONG_RUN > len(mask_T):
        return values_T[mask_T]
    return np.concatenate([values_T[start:end] for start, end in sampled_runs(runs_R)] or [values_T[:0]])


def scattered(values_M: Float32, runs_R: Ints) -> tuple[Float32, Bool]:
    """The inverse of `gathered`, with 0 where the mask is False; and the mask."""
    tokens = sum(runs_R)
    values_T = np.zeros(tokens, np.float32)
    if len(runs_R) * LONG_RUN > tokens:
        mask_T = mask_of(runs_R)
        values_T[mask_T] = values_M
        return values_T, mask_T
    mask_T = np.zeros(tokens, np.bool_)
    at = 0
    for start, end in sampled_runs(runs_R):
        values_T[start:end] = values_M[at : at + end - start]
        mask_T[start:end] = True
        at += end - start
    return values_T, mask_T


def sampled_before(runs_R: Ints, positions_P: Iterable[int]) -> list[int]:
    """How many tokens before each position are sampled. The positions are in order, none beyond the last token."""
    counts = []
    runs = iter(runs_R)
    start, end, before, sampled = 0, next(runs, 0), 0, False
    for position in positions_P:
        while end < position:
            before += end - start if sampled else 0
            start, end, sampled = end, end + next(runs), not sampled
        counts.append(before + position - start if sampled else before)
    return counts


def _spans(numbers_5S: Ints) -> list[VersionSpan]:
    """Spans of one version share the object: a group has few versions."""
    columns = [iter(numbers_5S)] * 5
    versions: dict[tuple[int, int], PolicyVersion] = {}
    spans = []
    for start, end, incarnation, step, kv in zip(*columns, strict=True):
        version = versions.get((incarnation, step))
        if version is None:
            version = versions[incarnation, step] = PolicyVersion(incarnation, step)
        spans.append(VersionSpan(start, end, version, KV[kv]))
    return spans


def _joined(arrays: list[npt.NDArray[Scalar]], dtype: type[Scalar]) -> npt.NDArray[Scalar]:
    return np.concatenate(arrays).astype(dtype, copy=False) if arrays else np.zeros(0, dtype)
