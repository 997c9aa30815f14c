"""Lag, ingest and batches: what becomes of a group, and when."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.messages import Group, GroupDelivery, Outcome, Trajectory, VersionSpan
from consumers.batch import Batcher
from consumers.ingest import SeenTasks, judge
from consumers.lag import group_lag, histogram
from headrace.version import PolicyVersion

FIRST = PolicyVersion(1, 0)


def trajectory(*steps: int, reward: float = 1.0, masked: tuple[int, ...] = ()) -> Trajectory:
    """A prompt of two tokens, then one sampled token per given version step; `masked` ones are out of the loss."""
    count = len(steps)
    mask = np.array([False, False] + [i not in masked for i in range(count)])
    spans = tuple(VersionSpan(2 + i, 3 + i, PolicyVersion(1, step)) for i, step in enumerate(steps))
    return Trajectory(
        np.arange(2 + count, dtype=np.int32), np.zeros(2 + count, np.float32), mask, spans, reward, "stop"
    )


def group(
    *trajectories: Trajectory,
    task_id: str = "t",
    outcome: Outcome = "played",
    error: str = "",
    failures: tuple[str, ...] = (),
) -> Group:
    return Group(task_id, 1, "train", "sums", 0, "p", trajectories, failures, outcome, error)


def delivery(number: int, *steps: int) -> GroupDelivery:
    return GroupDelivery(f"{number}-0", 10, group(trajectory(*steps), task_id=f"t{number}"))


def test_lag_is_that_of_the_oldest_token_of_the_group() -> None:
    assert group_lag(group(trajectory(7, 8), trajectory(5, 9)), 10, FIRST) == 5


def test_tokens_out_of_the_loss_do_not_count() -> None:
    assert group_lag(group(trajectory(2, 8, masked=(0,))), 10, FIRST) == 2
    assert group_lag(group(trajectory(2, masked=(0,))), 10, FIRST) == 0


@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))
def test_a_token_of_a_history_that_was_given_up_is_as_far_as_the_way_there(fork: int, ahead: int, since: int) -> None:
    """Sampled `ahead` steps beyond the fork by the trainer before, judged `since` steps after it."""
    old = group(trajectory(fork + ahead))
    assert group_lag(old, fork + since, PolicyVersion(2, fork)) == since + ahead
    assert group_lag(group(trajectory(fork)), fork + since, PolicyVersion(2, fork)) == since, "before it nothing forked"
    assert group_lag(old, fork + ahead + since, FIRST) == since, "this incarnation's own steps"


def test_histogram_counts_groups() -> None:
    assert histogram([2, 0, 2]) == {0: 1, 2: 2}


@pytest.mark.parametrize(
    ("arrived", "verdict"),
    [
        (group(outcome="failed", error="reward raised ValueError: no"), ("failed", "reward raised ValueError: no")),
        (group(outcome="dead", error="schema 2"), ("dead", "schema 2")),
        (group(failures=("deadline",)), ("failed", "deadline")),
        (group(), ("failed", "the group is empty")),
        (group(trajectory(1, reward=float("nan"))), ("failed", "a reward is not finite")),
        (group(trajectory(1, masked=(0,))), ("filtered", "no token was sampled")),
        (group(trajectory(1)), None),
    ],
)
def test_verdicts(arrived: Group, verdict: tuple[str, str] | None) -> None:
    assert judge(arrived, SeenTasks(10)) == verdict


def test_a_second_group_of_a_task_is_a_duplicate_also_after_a_restart() -> None:
    seen = SeenTasks(10)
    assert judge(group(trajectory(1)), seen) is None
    again = judge(replace(group(trajectory(1)), attempt=2), SeenTasks(10, seen.ids()))
    assert again == ("superseded", "a group of this task was here before")


def test_the_window_of_seen_tasks_is_bounded() -> None:
    seen = SeenTasks(2, ["a", "b", "c"])
    assert seen.ids() == ["b", "c"]
    assert "a" not in seen


def test_a_batch_is_whole_groups_in_order_of_arrival() -> None:
    batcher = Batcher(groups_per_step=2, max_lag=4)
    for number in range(3):
        batcher.add(delivery(number, 5))
        assert batcher.missing() == max(0, 1 - number)
    batch = batcher.form(7, PolicyVersion(3, 5))
    assert batch is not None
    assert [d.group.task_id for d in batch.deliveries] == ["t0", "t1"]
    assert (batch.version, batch.lags, batch.nbytes) == (PolicyVersion(3, 8), (2, 2), 20)
    assert batcher.form(8, PolicyVersion(3, 5)) is None


def test_groups_over_the_bound_become_stale_and_stand_in_the_next_record() -> None:
    batcher = Batcher(groups_per_step=1, max_lag=2)
    batcher.add(delivery(0, 4, 9))
    batcher.add(delivery(1, 7))
    stale = batcher.drop_stale(9, FIRST)
    assert [(e.entry_id, e.verdict, e.reason) for e in stale] == [("0-0", "stale", "lag 5")]
    batch = batcher.form(9, FIRST)
    assert batch is not None
    assert [(e.task_id, e.verdict) for e in batch.record.entries] == [("t1", "trained"), ("t0", "stale")]
    assert batcher.drop_stale(9, FIRST) == []
