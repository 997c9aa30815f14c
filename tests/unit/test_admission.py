"""Admission bounds outstanding work and lag."""

from __future__ import annotations

from collections import deque
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from consumers.admission import Window
from headrace.version import PolicyVersion

FIRST = PolicyVersion(1, 0)


@given(groups=st.integers(1, 9), max_lag=st.integers(0, 6), steps=st.integers(1, 12), seed=st.integers(0, 2**32))
def test_in_admission_order_no_group_is_older_than_the_bound(groups: int, max_lag: int, steps: int, seed: int) -> None:
    window = Window(groups, max_lag, steps)
    chance = Random(seed)
    waiting: deque[PolicyVersion] = deque()
    formed = admitted = 0
    while formed < steps:
        count = chance.randint(0, window.free(formed, len(waiting)))
        waiting.extend([window.min_version(formed, FIRST)] * count)
        admitted += count
        assert len(waiting) <= window.slots
        if len(waiting) < groups:
            assert window.free(formed, len(waiting)) > 0, "nothing can be admitted and no batch can be formed"
            continue
        batch = [waiting.popleft() for _ in range(groups)]
        assert max(formed - version.step for version in batch) <= max_lag
        formed += 1
    assert admitted == steps * groups
    assert window.free(formed, len(waiting)) == 0


@given(groups=st.integers(1, 9), max_lag=st.integers(0, 6), formed=st.integers(0, 50), outstanding=st.integers(0, 200))
def test_admits_no_more_than_the_remaining_steps_can_use(
    groups: int, max_lag: int, formed: int, outstanding: int
) -> None:
    window = Window(groups, max_lag, 50)
    total = outstanding + window.free(formed, outstanding)
    assert total <= max(outstanding, (50 - formed) * groups)
    assert total <= max(outstanding, window.slots)


def test_without_lag_a_task_waits_for_the_newest_version() -> None:
    window = Window(groups_per_step=4, max_lag=0, total_steps=10)
    assert (window.slots, window.min_version(3, FIRST)) == (4, PolicyVersion(1, 3))


def test_no_task_may_start_before_the_first_version_of_its_incarnation() -> None:
    window = Window(groups_per_step=4, max_lag=4, total_steps=10)
    assert window.min_version(5, PolicyVersion(2, 5)) == PolicyVersion(2, 5)
    assert window.min_version(6, PolicyVersion(2, 5)) == PolicyVersion(2, 5)
    assert window.min_version(7, PolicyVersion(2, 5)) == PolicyVersion(2, 6)
