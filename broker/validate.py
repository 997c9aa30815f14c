"""What a group must be before anything is computed from it. Pure: a reason, or None when it is sound."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import add, ge, gt, lt

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
    reason = _check_tokens(flat, limits) or _check_span_fields(flat)
    if reason:
        return reason
    if is_plain(flat):
        return _check_logprobs(flat, sum(flat.mask_runs_R[1::2]))
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
        len(array) for array in (flat.token_ids_T, flat.logprobs_M, flat.mask_runs_R, flat.spans_5S)
    ):
        return "tokens, log-probs, mask or spans of no trajectory"
    return None


def _check_tokens(flat: FlatGroup, limits: Limits) -> str | None:
    tokens = len(flat.token_ids_T)
    if min(flat.lengths_N) < 1:
        return "a trajectory without tokens"
    if sum(flat.lengths_N) != tokens:
        return f"lengths add up to {sum(flat.lengths_N)}, but there are {tokens} token ids"
    if flat.mask_runs_R and min(flat.mask_runs_R) < 0:
        return "a negative run in the loss mask"
    if sum(flat.mask_runs_R) != tokens:
        return f"the loss mask covers {sum(flat.mask_runs_R)} tokens of {tokens}"
    high = int(flat.token_ids_T.max())
    low = int(flat.token_ids_T.min()) if flat.token_ids_T.dtype.kind == "i" else 0
    if low < 0 or high >= limits.vocab_size:
        return f"token id {low if low < 0 else high} is outside the vocabulary of {limits.vocab_size}"
    if not all(map(math.isfinite, flat.rewards_N)):
        return "a reward is not finite"
    if min(flat.finish_N) < 0 or max(flat.finish_N) >= len(FINISH):
        return "an unknown finish reason"
    if min(flat.correct_N) < 0 or max(flat.correct_N) >= len(CORRECT):
        return "a trajectory that is neither right nor wrong nor unknown"
    return None


def _check_span_fields(flat: FlatGroup) -> str | None:
    """What one number says by itself."""
    if min(flat.span_counts_N) < 1 or 5 * sum(flat.span_counts_N) != len(flat.spans_5S):
        return "a trajectory without version spans, or spans of no trajectory"
    versions = (*flat.spans_5S[2::5], *flat.spans_5S[3::5])
    if min(versions) < 0 or max(versions) > MAX_VERSION:
        return "a version span with an impossible version"
    kvs = flat.spans_5S[4::5]
    if min(kvs) < 0 or max(kvs) >= len(KV):
        return "a version span with an unknown kv state"
    return None


def is_plain(flat: FlatGroup) -> bool:
    """Whether each trajectory is a prompt and then sampled tokens, which its spans cover without a gap.

    Nearly all are, and this is quickly seen. Where it is so, `_check_spans` finds nothing.
    """
    prompts, sampled = flat.mask_runs_R[::2], flat.mask_runs_R[1::2]
    if len(prompts) != len(flat.lengths_N) or [*map(add, prompts, sampled)] != [*flat.lengths_N] or min(sampled) < 1:
        return False
    starts, ends = flat.spans_5S[::5], flat.spans_5S[1::5]
    if not all(map(lt, starts, ends)):
        return False
    first = 0
    for prompt, length, count in zip(prompts, flat.lengths_N, flat.span_counts_N, strict=True):
        last = first + count - 1
        if not (
            0 <= starts[first] <= prompt and ends[last] == length and starts[first + 1 : last + 1] == ends[first:last]
        ):
            return False
        first = last + 1
    return True


def _check_sampled(flat: FlatGroup) -> str | None:
    before = sampled_before(flat.mask_runs_R, accumulate(flat.lengths_N, initial=0))
    for number, (early, late) in enumerate(pairwise(before)):
        if early == late:
            return f"trajectory {number} has no sampled token"
    return _check_logprobs(flat, before[-1])


def _check_logprobs(flat: FlatGroup, sampled: int) -> str | None:
    if len(flat.logprobs_M) != sampled:
        return f"{len(flat.logprobs_M)} log-probs for {sampled} sampled tokens"
    # NaN fails every comparison, so the two bounds also refuse what is not a number.
    if not (flat.logprobs_M.max() <= LOGPROB_SLACK and flat.logprobs_M.min() > -math.inf):
        number = int((~((flat.logprobs_M <= LOGPROB_SLACK) & (flat.logprobs_M > -math.inf))).argmax())
        before = sampled_before(flat.mask_runs_R, accumulate(flat.lengths_N, initial=0))
        return f"a log-prob of trajectory {bisect_right(before, number) - 1} is not finite, or above 0"
    return None


def _check_spans(flat: FlatGroup) -> str | None:
    starts, ends = flat.spans_5S[::5], flat.spans_5S[1::5]
    offsets: list[int] = []
    lengths: list[int] = []
    for end, length, count in zip(accumulate(flat.lengths_N), flat.lengths_N, flat.span_counts_N, strict=True):
        offsets += [end - length] * count
        lengths += [length] * count
    if min(starts) < 0 or any(map(gt, ends, lengths)) or any(map(ge, starts, ends)):
        return "a version span is empty or outside its trajectory"
    bounds = [
        bound + offset for start, end, offset in zip(starts, ends, offsets, strict=True) for bound in (start, end)
    ]
    if any(map(gt, bounds, bounds[1:])):
        return "version spans overlap or are out of order"
    before = sampled_before(flat.mask_runs_R, bounds)
    covered = sum(before[1::2]) - sum(before[::2])
    if covered != len(flat.logprobs_M):
        return f"version spans cover {covered} of {len(flat.logprobs_M)} sampled tokens"
    return None
