"""What stands for a task that nobody played in time, and what its entry must say."""

from __future__ import annotations

from dataclasses import asdict, replace

from broker.codec import encode_task
from broker.leases import Expired, Poison, Taken, judge
from broker.messages import Group, TaskDelivery
from tests.support import make_task

TASK = make_task("a", kind="eval", deadline_ms=1_000)
TAKEN = Taken("5-0", "2", 1, "a", "eval", encode_task(TASK))


def test_the_group_of_an_expired_task_says_whose_it_was() -> None:
    expired = judge(TAKEN, "p0", 3, 1_001)
    assert isinstance(expired, Expired)
    assert expired.delivery == TaskDelivery("5-0", 3, TASK)
    assert asdict(expired.group) == asdict(
        Group(
            task_id="a",
            attempt=3,
            kind="eval",
            environment="arithmetic",
            index=3,
            producer="p0",
            trajectories=(),
            outcome="failed",
            error="the deadline passed before a producer had a free slot",
        )
    )


def test_an_entry_that_names_another_task_than_its_body_is_poison() -> None:
    assert judge(replace(TAKEN, task_id="b"), "p0", 3, 0) == Poison(
        "the entry's fields and its body name different tasks"
    )
