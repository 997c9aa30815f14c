"""Admission bounds outstanding work and lag, and gives every run with a seed the same tasks."""

from __future__ import annotations

from collections import deque
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from consumers.admission import Curriculum, Source, Window, evaluation_tasks, shuffled
from headrace.errors import ConfigError
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


@given(size=st.integers(1, 300), key=st.text(max_size=5))
def test_shuffling_is_a_permutation(size: int, key: str) -> None:
    assert sorted(shuffled(position, size, key) for position in range(size)) == list(range(size))


def test_shuffling_differs_by_key_and_does_shuffle() -> None:
    orders = [[shuffled(position, 100, key) for position in range(100)] for key in ("a", "b")]
    assert orders[0] != orders[1]
    assert all(sum(i == place for i, place in enumerate(order)) < 10 for order in orders)


def _tasks(curriculum: Curriculum, count: int) -> list[tuple[str, str, int, int]]:
    made = [curriculum.task(n, group_size=2, min_version=FIRST, deadline_ms=1, formed=0) for n in range(count)]
    return [(task.task_id, task.environment, task.index, task.seed) for task in made]


def test_environments_take_turns_and_each_epoch_visits_every_index_once() -> None:
    sources = (Source("sums", 5), Source("logic", 3))
    tasks = _tasks(Curriculum(7, sources), 30)
    assert tasks == _tasks(Curriculum(7, sources), 30)
    assert [name for _, name, _, _ in tasks[:4]] == ["sums", "logic", "sums", "logic"]
    sums = [index for _, name, index, _ in tasks if name == "sums"]
    assert sorted(sums[:5]) == sorted(sums[5:10]) == list(range(5))
    assert len({task_id for task_id, *_ in tasks}) == len({seed for *_, seed in tasks}) == 30
    assert tasks != _tasks(Curriculum(8, sources), 30)


def test_an_environment_without_prompts_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'sums' has no training prompts"):
        Curriculum(0, (Source("sums", 0),))


def test_both_evaluations_ask_the_same() -> None:
    asked = {}
    for when, version in (("before", FIRST), ("after", PolicyVersion(1, 9))):
        tasks = evaluation_tasks(when, Source("sums", 4), 4, seed=3, group_size=5, version=version, deadline_ms=1)
        assert all(task.kind == "eval" and task.min_version == version and task.group_size == 5 for task in tasks)
        asked[when] = [(task.index, task.seed) for task in tasks]
        asked[f"{when} ids"] = [task.task_id for task in tasks]
    assert asked["before"] == asked["after"]
    assert not set(asked["before ids"]) & set(asked["after ids"])


def test_more_held_out_prompts_than_there_are_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"evaluation.prompts = 5: environment 'sums' has only 4 held-out prompts"):
        evaluation_tasks("before", Source("sums", 4), 5, seed=0, group_size=1, version=FIRST, deadline_ms=1)
