"""What becomes of a task at delivery, who may join, and which step records are history: pure decisions."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.api import Hello, RunRecord
from broker.arrivals import Arrival
from broker.codec import encode_task
from broker.identity import difference
from broker.leases import Expired, Poison, Taken, judge
from broker.messages import SCHEMA, StepRecord, TaskDelivery
from broker.sheet import balances
from broker.steps import replayable
from headrace.version import PolicyVersion
from tests.support import make_task

TASK = make_task("a", deadline_ms=1_000)
TAKEN = Taken("5-0", "2", 1, "a", "train", encode_task(TASK))


def test_a_task_is_played_with_its_attempts_counted_on() -> None:
    assert judge(TAKEN, "p0", 3, 1_000) == TaskDelivery("5-0", 3, TASK)
    assert judge(replace(TAKEN, deliveries=3), "p0", 3, 0) == TaskDelivery("5-0", 5, TASK)


def test_one_delivery_too_many_is_poison() -> None:
    assert judge(replace(TAKEN, deliveries=4), "p0", 3, 0) == Poison("delivered 3 times, finished by nobody")


def test_a_millisecond_late_fails_by_rule() -> None:
    expired = judge(TAKEN, "p0", 3, 1_001)
    assert isinstance(expired, Expired)
    assert (expired.delivery.attempt, expired.group.attempt, expired.group.trajectories) == (3, 3, ())
    assert "deadline" in expired.group.error


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"body": b"nonsense"}, "task: "),
        ({"task_id": "b"}, "different tasks"),
        ({"kind": "eval"}, "different tasks"),
        ({"attempts_before": ""}, "different tasks"),
        ({"attempts_before": "-1"}, "different tasks"),
        ({"attempts_before": "٣"}, "different tasks"),
        ({"attempts_before": "9" * 5000}, "different tasks"),
    ],
)
def test_what_cannot_be_read_is_poison_at_its_first_delivery(change: dict[str, object], says: str) -> None:
    poison = judge(replace(TAKEN, **change), "p0", 3, 0)
    assert isinstance(poison, Poison)
    assert says in poison.reason


@pytest.mark.parametrize("attempt", ["", "-1", "٣", "9" * 5000])
def test_a_group_whose_attempt_is_no_count_still_frees_its_slot(attempt: str) -> None:
    stand_in = Arrival("5-0", "a", attempt, "train", "p0", b"").refused("no group")
    assert (stand_in.task_id, stand_in.attempt, stand_in.error) == ("a", 0, "no group")


RECORD = RunRecord("r", SCHEMA, {}, {"model": "a" * 64, "chat_template": ""}, vocab_size=100)
HELLO = Hello("p0", SCHEMA, dict(RECORD.digests), "host", 1)


def test_the_difference_is_named_with_both_values() -> None:
    assert difference(RECORD, HELLO) == ""
    other = replace(HELLO, digests={"model": "b" * 64, "tokenizer": "c" * 64})
    assert difference(RECORD, other) == (
        f"model {'b' * 16}, the run has {'a' * 16}; tokenizer {'c' * 16}, the run has (none)"
    )
    assert difference(RECORD, replace(HELLO, schema=9)).startswith(f"it speaks wire schema 9, the run {SCHEMA}")


def log(*versions: tuple[int, int]) -> list[StepRecord]:
    return [StepRecord(PolicyVersion(*version), ()) for version in versions]


def test_a_fork_replaces_what_it_left_behind() -> None:
    records = log((1, 1), (1, 2), (1, 3), (2, 2), (2, 3), (3, 4))
    assert replayable(records, 0) == log((1, 1), (2, 2), (2, 3), (3, 4))
    assert replayable(records, 2) == log((2, 3), (3, 4))
    assert replayable([], 0) == []


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 9)), max_size=30), st.integers(0, 9))
def test_history_is_one_record_per_step_in_order_the_last_word_each(versions: list[tuple[int, int]], step: int) -> None:
    records = log(*versions)
    steps = [record.version.step for record in replayable(records, step)]
    assert steps == sorted(set(steps))
    assert all(number > step for number in steps)
    if records and records[-1].version.step > step:
        assert replayable(records, step)[-1] is records[-1]


def test_the_sheet_has_each_kind_that_ever_had_a_task() -> None:
    counts = {"train admitted": 5, "train v trained": 2, "train v stale": 1, "train r stale: lag 5": 1}
    (train,) = balances(("train", "eval"), counts, {"train": 2})
    assert train.closed
    assert (train.verdicts, train.reasons) == ({"stale": 1, "trained": 2}, {"stale: lag 5": 1})
    assert [sheet.kind for sheet in balances(("train", "eval"), {"eval admitted": 1}, {})] == ["train", "eval"]
    assert not balances(("train",), counts, {"train": 1})[0].closed
