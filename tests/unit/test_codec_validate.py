"""Validation on arrival: every way in which the numbers of a group can be wrong has its reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from broker.codec import decode_group, encode_group
from broker.flat import FlatGroup, flatten
from broker.messages import Group, VersionSpan
from broker.validate import Limits, check_flat, check_group
from headrace.errors import WireError
from headrace.version import PolicyVersion
from tests.support import make_group, make_task

LIMITS = Limits(100, {"train": 3})


@pytest.fixture
def group() -> Group:
    """Three trajectories of 4 prompt and 6 sampled tokens."""
    return make_group(make_task("a", group_size=3), 1, "p0")


@pytest.fixture
def flat(group: Group) -> FlatGroup:
    return flatten(group)


def test_a_sound_group_has_no_reason(group: Group) -> None:
    assert check_group(group, LIMITS) is None
    assert (
        check_group(replace(group, trajectories=group.trajectories[:2], failures=("reward: timeout",)), LIMITS) is None
    )
    assert check_group(replace(group, trajectories=(), outcome="failed", error="all members failed"), LIMITS) is None
    assert check_group(group, Limits(100, {})) is None


def spans(*rows: tuple[int, int]) -> tuple[VersionSpan, ...]:
    return tuple(VersionSpan(start, end, PolicyVersion(1, number)) for number, (start, end) in enumerate(rows))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"spans": ()}, "without version spans"),
        ({"spans": spans((4, 7))}, "cover 15 of 18 sampled tokens"),
        ({"spans": spans((4, 7), (8, 10))}, "cover 17 of 18"),
        ({"spans": spans((7, 10), (4, 7))}, "overlap or are out of order"),
        ({"spans": spans((4, 8), (7, 10))}, "overlap or are out of order"),
        ({"spans": spans((4, 11))}, "outside its trajectory"),
        ({"spans": spans((4, 4), (4, 10))}, "empty"),
        ({"spans": spans((10, 4))}, "empty or outside"),
        ({"spans": (VersionSpan(4, 10, PolicyVersion(-1, 2)),)}, "impossible version"),
        ({"spans": (VersionSpan(4, 10, PolicyVersion(1, -2)),)}, "impossible version"),
        ({"loss_mask_T": np.zeros(10, np.bool_)}, "trajectory 1 has no sampled token"),
        ({"logprobs_T": np.full(10, np.nan, np.float32)}, "a log-prob of trajectory 1 is not finite, or above 0"),
        ({"logprobs_T": np.full(10, -np.inf, np.float32)}, "a log-prob of trajectory 1 is not finite, or above 0"),
        ({"logprobs_T": np.full(10, 0.01, np.float32)}, "a log-prob of trajectory 1 is not finite, or above 0"),
        ({"reward": float("nan")}, "reward is not finite"),
        ({"reward": float("inf")}, "reward is not finite"),
        ({"token_ids_T": np.full(10, 100, np.int32)}, "token id 100 is outside the vocabulary of 100"),
        ({"token_ids_T": np.full(10, -5, np.int32)}, "token id -5 is outside"),
    ],
)
def test_one_bad_trajectory_is_a_reason_over_the_wire_and_without(
    group: Group, change: dict[str, Any], says: str
) -> None:
    members = list(group.trajectories)
    members[1] = replace(members[1], **change)
    bad = replace(group, trajectories=tuple(members))
    assert says in (check_group(bad, LIMITS) or "")
    with pytest.raises(WireError, match=says.split(" of ")[0]):
        decode_group(encode_group(bad, 100), LIMITS)


def test_a_logprob_may_round_to_a_little_above_zero(group: Group) -> None:
    members = [replace(member, logprobs_T=np.full(10, 1e-4, np.float32)) for member in group.trajectories]
    assert check_group(replace(group, trajectories=tuple(members)), LIMITS) is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"lengths_N": [10, 10, 11]}, "lengths add up to 31, but there are 30 token ids"),
        ({"lengths_N": [20, 10, 0]}, "without tokens"),
        ({"lengths_N": [10, 20]}, "rewards of 3 trajectories"),
        ({"rewards_N": [0.0] * 4}, "rewards of 4 trajectories, but lengths of 3"),
        ({"finish_N": [0, 0]}, "finish reasons of 2"),
        ({"finish_N": [0, 1, 3]}, "unknown finish reason"),
        ({"correct_N": [0, 0]}, "verdicts of 2"),
        ({"correct_N": [0, 1, 3]}, "neither right nor wrong"),
        ({"span_counts_N": [2, 2]}, "spans of 2"),
        ({"span_counts_N": [2, 2, 3]}, "spans of no trajectory"),
        ({"span_counts_N": [2, 4, 0]}, "without version spans"),
        ({"mask_runs_R": [4, 6, 4, 6, 4, 7]}, "loss mask covers 31 tokens of 30"),
        ({"mask_runs_R": [31, -1]}, "negative run"),
        ({"logprobs_M": np.zeros(17, np.float32)}, "17 log-probs for 18 sampled tokens"),
        ({"error": "it failed"}, "a played group with an error"),
        ({"outcome": "failed"}, "a failed group with 3 trajectories"),
        ({"outcome": "stale", "error": "lag 9"}, "a stale group with 3 trajectories"),
        ({"stopped_N": (1, 2, 3, 4)}, "4 stopped rollouts in a group of 3"),
        ({"failures": ("a", "b", "c", "d")}, "4 failures in a group of 3"),
    ],
)
def test_arrays_that_contradict_each_other_are_a_reason(flat: FlatGroup, change: dict[str, Any], says: str) -> None:
    assert says in (check_flat(replace(flat, **change), LIMITS) or "")


@pytest.mark.parametrize(
    "change",
    [
        {"mask_runs_R": [0, 2**32 - 1]},
        {"token_ids_T": np.zeros(1, np.int32)},
        {"logprobs_M": np.zeros(1, np.float32)},
        {"spans_5S": [0] * 5},
    ],
)
def test_a_failed_group_that_carries_arrays_is_refused_before_they_are_unfolded(
    group: Group, change: dict[str, Any]
) -> None:
    failed = flatten(replace(group, trajectories=(), outcome="failed", error="all members failed"))
    assert check_flat(failed, LIMITS) is None
    assert check_flat(replace(failed, **change), LIMITS) == "tokens, log-probs, mask or spans of no trajectory"


def test_an_unknown_kv_state_is_a_reason(flat: FlatGroup) -> None:
    spans = [*flat.spans_5S[:19], 2, *flat.spans_5S[20:]]
    assert check_flat(replace(flat, spans_5S=spans), LIMITS) == "a version span with an unknown kv state"


def test_group_size_is_that_of_the_kind(group: Group) -> None:
    assert check_group(group, Limits(100, {"train": 2})) == "3 trajectories in a group of 2"
    assert check_group(replace(group, kind="eval"), Limits(100, {"train": 2, "eval": 3})) is None


def test_nothing_at_all_is_a_reason(group: Group) -> None:
    assert check_group(replace(group, trajectories=()), LIMITS) == "no trajectories, and no outcome that says why"
    failed = replace(group, trajectories=(), outcome="failed")
    assert check_group(failed, LIMITS) == "a failed group with no error"
