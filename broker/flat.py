"""A group as a structure of arrays: what the codec writes, what validation looks at, all trajectories end to end.

The numbers of tokens lie in two numpy arrays. What a group has few of (lengths, runs, spans) is plain Python: for
some dozens of numbers that costs less than one numpy call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, islice, pairwise
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from broker.messages import Bool, FinishReason, Float32, Group, KvState, Outcome, TaskKind, Trajectory, VersionSpan
from headrace.errors import WireError
from headrace.version import PolicyVersion

FINISH: tuple[FinishReason, ...] = ("stop", "length", "abort")
KV: tuple[KvState, ...] = ("kept", "fresh")
CORRECT: tuple[bool | None, ...] = (False, True, None)
LONG_RUN = 64
"""Tokens; from this mean length on, runs are copied one by one, below they are scattered through the mask."""
_BOOL, _INT32, _FLOAT32 = np.dtype(np.bool_), np.dtype(np.int32), np.dtype(np.float32)
_FINISH_INDEX = {finish: index for index, finish in enumerate(FINISH)}
_KV_INDEX = {kv: index for index, kv in enumerate(KV)}
_CORRECT_INDEX = {correct: index for index, correct in enumerate(CORRECT)}

Scalar = TypeVar("Scalar", bound=np.generic)
Ints = Sequence[int]


@dataclass(slots=True, eq=False)
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
    lengths: list[int] = []
    runs: list[int] = []
    spans: list[int] = []
    sampled: list[Float32] = []
    for member in group.trajectories:
        mask_T, logprobs_T = member.loss_mask_T, member.logprobs_T
        if mask_T.dtype != _BOOL:
            mask_T = mask_T.astype(_BOOL)
        length = len(mask_T)
        if not length == len(member.token_ids_T) == len(logprobs_T):
            raise _unequal(group)
        lengths.append(length)
        own = runs_of(mask_T)
        runs += own
        sampled += parts_of(logprobs_T, mask_T, own)
        for start, end, (incarnation, step), kv in member.spans:
            spans += (start, end, incarnation, step, _KV_INDEX[kv])
    members = group.trajectories
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
        token_ids_T=_joined([member.token_ids_T for member in members], _INT32),
        logprobs_M=_joined(sampled, _FLOAT32),
        mask_runs_R=runs,
        span_counts_N=[len(member.spans) for member in members],
        spans_5S=spans,
        rewards_N=[member.reward for member in members],
        finish_N=[_FINISH_INDEX[member.finish_reason] for member in members],
        correct_N=[_CORRECT_INDEX[member.correct] for member in members],
    )


def unflatten(flat: FlatGroup) -> Group:
    """The inverse of `flatten`. The flat group must be valid (see `broker/validate.py`)."""
    token_ids_T = flat.token_ids_T.astype(np.int32, copy=False)
    logprobs_T, mask_T = scattered(flat.logprobs_M, flat.mask_runs_R)
    spans = _spans(flat.spans_5S)
    bounds = [*pairwise(accumulate(flat.lengths_N, initial=0))]
    trajectories = map(
        Trajectory,
        [token_ids_T[start:end] for start, end in bounds],
        [logprobs_T[start:end] for start, end in bounds],
        [mask_T[start:end] for start, end in bounds],
        [tuple(islice(spans, count)) for count in flat.span_counts_N],
        flat.rewards_N,
        map(FINISH.__getitem__, flat.finish_N),
        map(CORRECT.__getitem__, flat.correct_N),
    )
    return Group(
        task_id=flat.task_id,
        attempt=flat.attempt,
        kind=flat.kind,
        environment=flat.environment,
        index=flat.index,
        producer=flat.producer,
        trajectories=tuple(trajectories),
        failures=flat.failures,
        outcome=flat.outcome,
        error=flat.error,
        stopped_N=flat.stopped_N,
        seconds=flat.seconds,
    )


def runs_of(mask_T: Bool) -> list[int]:
    """Run lengths of a mask in pairs: not sampled, sampled. [F, F, T] is [2, 1], [T, F] is [0, 1, 1, 0], [] is []."""
    raw = mask_T.tobytes()
    first = raw.find(1)
    if first >= 0 and raw.find(0, first) < 0:
        # A prompt and then sampled tokens: nearly all are so.
        return [first, len(raw) - first]
    changes = (np.flatnonzero(mask_T[1:] != mask_T[:-1]) + 1).tolist()
    bounds = [0, 0] if first == 0 else [0]
    runs = [end - start for start, end in pairwise((*bounds, *changes, len(raw)))] if raw else []
    return [*runs, 0] if len(runs) % 2 else runs


def mask_of(runs_R: Ints) -> Bool:
    """The inverse of `runs_of`; a run that is negative raises ValueError."""
    return np.repeat(np.arange(len(runs_R)) % 2 == 1, runs_R)


def sampled_runs(runs_R: Ints) -> list[tuple[int, int]]:
    """Start and end of each run of True that is not empty."""
    bounds = [*accumulate(runs_R, initial=0)]
    return [(start, end) for start, end in zip(bounds[1::2], bounds[2::2], strict=False) if start < end]


def parts_of(values_T: Float32, mask_T: Bool, runs_R: Ints) -> list[Float32]:
    """The values where the mask, whose runs these are, is True."""
    if len(runs_R) == 2:
        return [values_T[runs_R[0] :]]
    return [values_T[mask_T]]


def scattered(values_M: Float32, runs_R: Ints) -> tuple[Float32, Bool]:
    """The inverse of `parts_of`, joined, with 0 where the mask is False; and the mask."""
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


def _spans(numbers_5S: Ints) -> Iterator[VersionSpan]:
    """Spans of one version share the object: a group has few versions."""
    keys = [*zip(numbers_5S[2::5], numbers_5S[3::5], strict=True)]
    versions = {key: PolicyVersion(*key) for key in {*keys}}
    kvs = map(KV.__getitem__, numbers_5S[4::5])
    return map(_span, zip(numbers_5S[::5], numbers_5S[1::5], map(versions.__getitem__, keys), kvs, strict=True))


_span = cast(Callable[[tuple[int, int, PolicyVersion, KvState]], VersionSpan], partial(tuple.__new__, VersionSpan))
"""As `VersionSpan._make`, in a third of the time."""


def _unequal(group: Group) -> WireError:
    sizes = ((len(one.token_ids_T), len(one.logprobs_T), len(one.loss_mask_T)) for one in group.trajectories)
    number, (tokens, logprobs, mask) = next(pair for pair in enumerate(sizes) if len(set(pair[1])) > 1)
    return WireError(
        f"group of task {group.task_id}: trajectory {number} has {tokens} token ids, {logprobs} log-probs "
        f"and a loss mask of {mask}; all must have one entry per token"
    )


def _joined(arrays: list[npt.NDArray[Scalar]], dtype: np.dtype[Scalar]) -> npt.NDArray[Scalar]:
    if not arrays:
        return np.zeros(0, dtype)
    joined = np.concatenate(arrays)
    return joined if joined.dtype == dtype else joined.astype(dtype)
