"""Lag, also across histories that were given up, and what is left of a group that is too old."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from broker.api import Reign
from consumers.lag import History, Staleness, group_lag, histogram
from headrace.version import PolicyVersion
from tests.groups import group, trajectory

ALONE = History({1: Reign(0, 0)})


def test_lag_is_that_of_the_oldest_token_of_the_group() -> None:
    assert group_lag(group(trajectory(7, 8), trajectory(5, 9)), 10, ALONE) == 5


def test_tokens_out_of_the_loss_do_not_count() -> None:
    assert group_lag(group(trajectory(2, 8, masked=(0,))), 10, ALONE) == 2
    assert group_lag(group(trajectory(2, masked=(0,))), 10, ALONE) == 0


@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))
def test_a_token_of_a_history_that_was_given_up_is_as_far_as_the_way_there(fork: int, ahead: int, since: int) -> None:
    """Sampled `ahead` steps beyond the fork by the trainer before, judged `since` steps after it."""
    forked = History({1: Reign(0, fork + ahead), 2: Reign(fork, fork + since)})
    old = group(trajectory(fork + ahead))
    assert group_lag(old, fork + since, forked) == since + ahead
    assert group_lag(group(trajectory(fork)), fork + since, forked) == since, "before it nothing forked"
    assert group_lag(old, fork + ahead + since, forked.until(1)) == since, "as the first incarnation knew it"
    assert forked.until(1).begun(PolicyVersion(2, fork)).lag(PolicyVersion(1, fork + ahead), fork + since) == (
        since + ahead
    )
    assert forked.given_up(PolicyVersion(2, fork)) == ahead


@dataclass
class Tree:
    """All versions that ever were, each with the one that it was made from."""

    parents: dict[PolicyVersion, PolicyVersion | None] = field(default_factory=dict)
    line: list[PolicyVersion] = field(default_factory=list)
    """The present history; place n is step n."""
    reigns: dict[int, Reign] = field(default_factory=dict)

    def reign(self, incarnation: int, back: int, steps: int) -> None:
        """An incarnation that repeats all but the last `back` steps, and makes `steps` more."""
        first = max(0, len(self.line) - 1 - back)
        same = self.line[first] if self.line else None
        del self.line[first:]
        for step in range(first, first + steps + 1):
            version = PolicyVersion(incarnation, step)
            # Its first version has the weights of the step that it goes on from: no step lies between the two.
            self.parents[version] = same if step == first else PolicyVersion(incarnation, step - 1)
            self.line.append(version)
        self.reigns[incarnation] = Reign(first, first + steps)

    def way(self, version: PolicyVersion) -> list[PolicyVersion]:
        """From a version back to the beginning, one per step; versions with the same weights count as one."""
        way: list[PolicyVersion] = []
        at: PolicyVersion | None = version
        while at is not None:
            before = self.parents[at]
            if before is None or before.step < at.step:
                way.append(at)
            at = before
        return way

    def distance(self, one: PolicyVersion, other: PolicyVersion) -> int:
        a, b = self.way(one), self.way(other)
        return len(a) + len(b) - 2 * len(set(a) & set(b))


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=7))
def test_lag_is_the_way_through_the_tree_of_all_versions(lives: list[tuple[int, int]]) -> None:
    tree = Tree()
    for incarnation, (back, steps) in enumerate(lives, 1):
        tree.reign(incarnation, back, steps)
    history = History(tree.reigns)
    now = tree.line[-1]
    for version in tree.parents:
        assert history.lag(version, now.step) == tree.distance(version, now), f"{version} from {now}"


def test_what_is_not_too_old_is_left_as_it_is() -> None:
    fresh = group(trajectory(5, 6))
    for rule in (Staleness(5), Staleness(5, mask=True)):
        assert rule.fit(fresh, 10, ALONE) is fresh
    assert Staleness(4).fit(fresh, 10, ALONE) is None


def test_masked_tokens_leave_the_loss_and_nobody_elses_arrays_change() -> None:
    old, young = trajectory(4, 8), trajectory(9, 9)
    masked = Staleness(3, mask=True).fit(group(old, young), 10, ALONE)
    assert masked is not None
    assert masked.trajectories[0].loss_mask_T.tolist() == [False, False, False, True]
    assert masked.trajectories[1] is young
    assert old.loss_mask_T.tolist() == [False, False, True, True]
    assert group_lag(masked, 10, ALONE) == 2
    assert np.shares_memory(masked.trajectories[0].token_ids_T, old.token_ids_T)


def test_a_group_goes_only_when_no_token_is_left() -> None:
    rule = Staleness(3, mask=True)
    assert rule.fit(group(trajectory(4), trajectory(8)), 10, ALONE) is not None
    assert rule.fit(group(trajectory(4), trajectory(5)), 10, ALONE) is None
    assert rule.fit(group(trajectory(4), trajectory(8, masked=(0,))), 10, ALONE) is None


@given(st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=6), min_size=1, max_size=4), st.integers(0, 12))
def test_after_masking_no_token_in_the_loss_is_too_old(steps: list[list[int]], max_lag: int) -> None:
    made = group(*(trajectory(*each) for each in steps))
    left = Staleness(max_lag, mask=True).fit(made, 12, ALONE)
    kept = [step for each in steps for step in each if 12 - step <= max_lag]
    if left is None:
        assert not kept
    else:
        assert group_lag(left, 12, ALONE) == 12 - min(kept)
        assert sum(int(one.loss_mask_T.sum()) for one in left.trajectories) == len(kept)


def test_histogram_counts_groups() -> None:
    assert histogram([2, 0, 2]) == {0: 1, 2: 2}
