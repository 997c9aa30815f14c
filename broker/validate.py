"""What a group must be before anything is computed from it. Pure: a reason, or None when it is sound."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from broker.flat import CORRECT, FINISH, KV, FlatGroup, flatten, sampled_before
from broker.messages import Group, TaskKind
from headrace.errors import WireError

LOGPROB_SLACK = 1e-3
"""A log-probability may be this much above 0: a softmax in half precision rounds."""
MAX_GROUP_BYTES = 64 << 20
"""An entry beyond this is not even decoded."""

MAX_VERSION = 2**31 - 1
"""Largest incarnation and step."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the run allows."""

    vocab_size: int
    group_sizes: dict[TaskKind, int]
    """Most rollouts of one group, by kind; a kind that is absent is not checked."""


def check_group(group: Group, limits: Limits) -> str | None:
    """As `check_flat`, for a group that came as an object."""
    try:
        return check_flat(flatten(group), limits)
    except WireError as error:
        return str(error)


def check_flat(flat: FlatGroup, limits: Limits) -> str | None:
    """The first thing that is wrong with a group, as a reason; None when there is nothing."""
    reason = _check_counts(flat, limits)
    if reason or not len(flat.lengths_N):
        return reason
    reason = _check_tokens(flat, limits)
    if reason:
        return reason
    return _check_sampled(flat) or _check_spans(flat)


def _check_counts(flat: FlatGroup, limits: Limits) -> str | None:
    members = len(flat.lengths_N)
    most = limits.group_sizes.get(flat.kind)
    if most is not None and members > most:
        return f"{members} trajectories in a group of {most}"
    if most is not None and len(flat.failures) > most:
        return f"{len(flat.failures)} failures in a group of {most}"
    if most is not None and len(flat.stopped_N) > most:
        return f"{len(flat.stopped_N)} stopped rollouts in a group of {most}"
    if flat.outcome != "played" and members:
        return f"a {flat.outcome} group with {members} trajectories"
    if flat.outcome == "played" and not members:
        return "no trajectories, and no outcome that says why"
    if (flat.outcome == "played") == bool(flat.error):
        return f"a {flat.outcome} group with {'an' if flat.error else 'no'} error"
    columns = (
        ("rewards", flat.rewards_N),
        ("finish reasons", flat.finish_N),
        ("verdicts", flat.correct_N),
        ("spans", flat.span_counts_N),
    )
    for name, array in columns:
        if len(array) != members:
            return f"{name} of {len(array)} trajectories, but lengths of {members}"
    # Nothing below looks at the arrays of a group without members, and a few mask runs may claim gigabytes.
    if not members and any(
        len(array) for array in (flat.token_ids_T, flat.logprobs_M, flat.mask_runs_R, flat.spans_S5)
    ):
        return "tokens, log-probs, mask or spans of no trajectory"
    return None


def _check_tokens(flat: FlatGroup, limits: Limits) -> str | None:
    tokens = len(flat.token_ids_T)
    if flat.lengths_N.min() < 1:
        return "a trajectory without tokens"
    if int(flat.lengths_N.sum()) != tokens:
        return f"lengths add up to {int(flat.lengths_N.sum())}, but there are {tokens} token ids"
    if len(flat.mask_runs_R) and flat.mask_runs_R.min() < 0:
        return "a negative run in the loss mask"
    if int(flat.mask_runs_R.sum()) != tokens:
        return f"the loss mask covers {int(flat.mask_runs_R.sum())} tokens of {tokens}"
    low, high = int(flat.token_ids_T.min()), int(flat.token_ids_T.max())
    if low < 0 or high >= limits.vocab_size:
        return f"token id {low if low < 0 else high} is outside the vocabulary of {limits.vocab_size}"
    if not np.isfinite(flat.rewards_N).all():
        return "a reward is not finite"
    if flat.finish_N.min() < 0 or flat.finish_N.max() >= len(FINISH):
        return "an unknown finish reason"
    if flat.correct_N.min() < 0 or flat.correct_N.max() >= len(CORRECT):
        return "a trajectory that is neither right nor wrong nor unknown"
    return None


def _check_sampled(flat: FlatGroup) -> str | None:
    ends = np.cumsum(flat.lengths_N)
    sampled_N = np.diff(sampled_before(flat.mask_runs_R, ends), prepend=0)
    if sampled_N.min() < 1:
        return f"trajectory {int(sampled_N.argmin())} has no sampled token"
    if len(flat.logprobs_M) != int(sampled_N.sum()):
        return f"{len(flat.logprobs_M)} log-probs for {int(sampled_N.sum())} sampled tokens"
    # NaN fails every comparison, so the two bounds also refuse what is not a number.
    if not (flat.logprobs_M.max() <= LOGPROB_SLACK and flat.logprobs_M.min() > -np.inf):
        return "a log-prob is not finite, or above 0"
    return None


def _check_spans(flat: FlatGroup) -> str | None:
    if flat.span_counts_N.min() < 1 or int(flat.span_counts_N.sum()) != len(flat.spans_S5):
        return "a trajectory without version spans, or spans of no trajectory"
    start, end, incarnation, step, kv = flat.spans_S5.T
    lengths_S = np.repeat(flat.lengths_N, flat.span_counts_N)
    if start.min() < 0 or (end > lengths_S).any() or (start >= end).any():
        return "a version span is empty or outside its trajectory"
    if min(incarnation.min(), step.min()) < 0 or max(incarnation.max(), step.max()) > MAX_VERSION:
        return "a version span with an impossible version"
    if kv.min() < 0 or kv.max() >= len(KV):
        return "a version span with an unknown kv state"
    offset_S = np.repeat(np.cumsum(flat.lengths_N) - flat.lengths_N, flat.span_counts_N)
    first, last = offset_S + start, offset_S + end
    if (first[1:] < last[:-1]).any():
        return "version spans overlap or are out of order"
    at_bounds = sampled_before(flat.mask_runs_R, np.concatenate((first, last)))
    covered = int(at_bounds[len(first) :].sum() - at_bounds[: len(first)].sum())
    sampled = len(flat.logprobs_M)
    if covered != sampled:
        return f"version spans cover {covered} of {sampled} sampled tokens"
    return None
