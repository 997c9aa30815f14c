"""What a trainer that resumes does with the groups that were left open."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from broker.messages import Group, GroupDelivery, StepEntry, StepRecord, Trajectory, VersionSpan
from consumers.ingest import SeenTasks
from consumers.resume import plan_replay
from headrace.version import PolicyVersion


def delivery(number: int) -> GroupDelivery:
    mask = np.array([False, True])
    spans = (VersionSpan(1, 2, PolicyVersion(1, 3)),)
    one = Trajectory(np.zeros(2, np.int32), np.zeros(2, np.float32), mask, spans, 1.0, "stop")
    return GroupDelivery(f"{number}-0", 1, Group(f"t{number}", 1, "train", "sums", 0, "p", (one,)))


def record(step: int, *numbers: int, stale: tuple[int, ...] = ()) -> StepRecord:
    trained = [StepEntry(f"{n}-0", f"t{n}", "trained") for n in numbers]
    return StepRecord(
        PolicyVersion(1, step), (*trained, *(StepEntry(f"{n}-0", f"t{n}", "stale", "lag 9") for n in stale))
    )


OPEN = [delivery(n) for n in range(8)]


def ids(deliveries: tuple[GroupDelivery, ...]) -> list[str]:
    return [d.group.task_id for d in deliveries]


def test_steps_after_the_checkpoint_are_made_again_entry_by_entry() -> None:
    replay = plan_replay([record(5, 3, 1), record(6, 2, 0)], OPEN[:6], 4, SeenTasks(9))
    assert [(ids(batch.deliveries), batch.version) for batch in replay.batches] == [
        (["t3", "t1"], PolicyVersion(1, 5)),
        (["t2", "t0"], PolicyVersion(1, 6)),
    ]
    assert [batch.lags for batch in replay.batches] == [(1, 1), (2, 2)]
    assert ids(replay.fresh) == ["t4", "t5"]
    assert (replay.settled, replay.fork) == ((), "")


def test_what_the_checkpoint_contains_is_settled_and_not_trained_again() -> None:
    replay = plan_replay([record(5, 2, stale=(3,))], OPEN[:5], 4, SeenTasks(9, ["t0", "t1"]))
    assert [(e.task_id, e.verdict, e.reason) for e in replay.settled] == [
        ("t3", "stale", "lag 9"),
        ("t0", "trained", ""),
        ("t1", "trained", ""),
    ]
    assert ids(replay.fresh) == ["t4"]


def test_a_step_whose_groups_are_gone_ends_the_replay_and_frees_the_rest() -> None:
    replay = plan_replay([record(5, 0), record(6, 1, 9), record(7, 2)], OPEN[:4], 4, SeenTasks(9))
    assert [batch.version.step for batch in replay.batches] == [5]
    assert replay.fork == "step 6 lacks 1 of its 2 groups"
    assert ids(replay.fresh) == ["t1", "t2", "t3"]


def test_a_hole_in_the_log_ends_the_replay() -> None:
    replay = plan_replay([record(6, 0)], OPEN[:2], 4, SeenTasks(9))
    assert (replay.batches, replay.fork) == ((), "step 5 is not in the log")
    assert ids(replay.fresh) == ["t0", "t1"]


@given(st.permutations(range(8)), st.sets(st.integers(0, 7)), st.sets(st.integers(0, 7)))
def test_every_open_group_goes_exactly_one_way(order: list[int], lost: set[int], trained: set[int]) -> None:
    there = [delivery(n) for n in range(8) if n not in lost]
    logged = [n for n in order if n not in trained]
    records = [record(5 + i, *logged[2 * i : 2 * i + 2]) for i in range(len(logged) // 2)]
    replay = plan_replay(records, there, 4, SeenTasks(9, [f"t{n}" for n in trained]))
    ways = [e.task_id for e in replay.settled] + ids(replay.fresh)
    ways += [task for batch in replay.batches for task in ids(batch.deliveries)]
    assert sorted(ways) == sorted(d.group.task_id for d in there)
