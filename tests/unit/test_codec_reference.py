"""The quick ways of codec and validation against what they stand for, token by token."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from broker.codec import decode_flat, encode_group
from broker.flat import LONG_RUN, flatten, mask_of, parts_of, runs_of, scattered
from broker.messages import Group, Trajectory, VersionSpan
from broker.validate import Limits, check_flat, is_plain
from headrace.version import PolicyVersion
from tests.support import make_group, make_task

LIMITS = Limits(100, {"train": 8})
Member = tuple[list[bool], list[tuple[int, int]]]
"""A mask, and the start and end of each span."""


@st.composite
def members(draw: st.DrawFn) -> Member:
    """Often a prompt and then sampled tokens, covered by spans without a gap, or nearly so; sometimes anything."""
    if draw(st.booleans()):
        mask = draw(st.lists(st.booleans(), min_size=1, max_size=12))
        places = st.integers(0, len(mask) + 1)
        return mask, draw(st.lists(st.tuples(places, places), max_size=4))
    prompt, sampled = draw(st.integers(0, 4)), draw(st.integers(0, 6))
    length = max(1, prompt + sampled)
    mask = [place >= prompt for place in range(length)]
    cuts = [draw(st.integers(0, prompt)), *sorted(draw(st.lists(st.integers(prompt, length), max_size=2))), length]
    wrong = draw(st.integers(-2, len(cuts) - 1))
    if wrong >= 0:
        cuts[wrong] = max(0, cuts[wrong] + draw(st.sampled_from([-1, 1])))
    spans = list(pairwise(cuts))
    gap = draw(st.integers(-4, len(spans) - 1))
    if gap >= 0:
        spans[gap] = (spans[gap][0], max(0, spans[gap][1] - 1))
    return mask, spans


def group_of(given_members: list[Member]) -> Group:
    members = tuple(
        Trajectory(
            token_ids_T=np.arange(len(mask), dtype=np.int32),
            logprobs_T=np.where(mask, -1.0, 0.0).astype(np.float32),
            loss_mask_T=np.array(mask),
            spans=tuple(VersionSpan(start, end, PolicyVersion(1, 2)) for start, end in spans),
            reward=0.5,
            finish_reason="stop",
        )
        for mask, spans in given_members
    )
    return replace(make_group(make_task("a"), 1, "p0"), trajectories=members)


def is_sound(mask: list[bool], spans: list[tuple[int, int]]) -> bool:
    covered = [place for start, end in spans for place in range(start, end)]
    return (
        any(mask)
        and bool(spans)
        and all(0 <= start < end <= len(mask) for start, end in spans)
        and covered == sorted(set(covered))
        and all(place in covered for place, sampled in enumerate(mask) if sampled)
    )


T, F = True, False


@given(st.lists(members(), min_size=1, max_size=4))
@example([([F, T], [(0, 2)]), ([T], [(0, 1)])])
@example([([T, F], [(0, 1)]), ([F, T], [(1, 2)])])
@example([([F, T, T], [(2, 3)])])
@example([([F, T, T, T], [(1, 2), (3, 4)])])
@example([([F, T, T, T], [(1, 3), (2, 4)])])
@example([([F, T, T], [(0, 2)])])
@example([([F, T], [(1, 2), (2, 2)])])
@example([([F, F], [(0, 2)]), ([T], [(0, 1)])])
@example([([F, T], [(1, 3)]), ([F, T], [(1, 2)])])
@example([([T, F, T], [(2, 3), (0, 1)])])
@example([([T, F, T], [(0, 2), (1, 3)])])
def test_a_group_is_sound_when_each_of_its_tokens_is(given_members: list[Member]) -> None:
    group = group_of(given_members)
    expected = all(is_sound(mask, spans) for mask, spans in given_members)
    assert (check_flat(flatten(group), LIMITS) is None) is expected
    assert (check_flat(decode_flat(encode_group(group, 100)), LIMITS) is None) is expected
    if all(spans for _, spans in given_members) and is_plain(flatten(group)):
        assert expected


def test_the_usual_group_is_plain_and_empty_runs_change_nothing() -> None:
    flat = flatten(make_group(make_task("a"), 1, "p0"))
    assert is_plain(flat)
    for runs in ([*flat.mask_runs_R, 0], [*flat.mask_runs_R, 0, 0], [0, 0, *flat.mask_runs_R]):
        assert check_flat(replace(flat, mask_runs_R=runs), LIMITS) is None


@given(st.lists(st.integers(0, 3 * LONG_RUN), max_size=8), st.booleans())
def test_values_are_scattered_to_where_they_were(runs: list[int], short: bool) -> None:
    runs = [run // LONG_RUN if short else run for run in runs]
    mask_T = mask_of(runs)
    values_T = np.where(mask_T, np.arange(len(mask_T)) + 1, 0).astype(np.float32)
    found, found_mask = scattered(values_T[mask_T], runs)
    assert np.array_equal(found, values_T)
    assert np.array_equal(found_mask, mask_T)
    own = runs_of(mask_T)
    assert np.array_equal(mask_of(own), mask_T)
    assert np.array_equal(np.concatenate([np.zeros(0), *parts_of(values_T, mask_T, own)]), values_T[mask_T])


@pytest.mark.parametrize("dtype", [np.int64, np.float64])
def test_masks_and_numbers_of_other_types_are_taken(dtype: type) -> None:
    group = make_group(make_task("a"), 1, "p0")
    other = tuple(
        replace(one, loss_mask_T=one.loss_mask_T.astype(dtype), logprobs_T=one.logprobs_T.astype(np.float64))
        for one in group.trajectories
    )
    assert encode_group(replace(group, trajectories=other), 100) == encode_group(group, 100)
