"""What a trainer that resumes does with the groups that were left open."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from broker.api import Reign
from broker.messages import Group, GroupDelivery, StepEntry, StepRecord, Trajectory, VersionSpan
from consumers.ingest import SeenTasks
from consumers.lag import History, Staleness
from consumers.resume import Replay
from consumers.resume import plan_replay as plan
from headrace.version import PolicyVersion
from tests.groups import group, trajectory


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


HISTORY = History({1: Reign(0, 9)})


def plan_replay(
    records: list[StepRecord],
    deliveries: list[GroupDelivery],
    step: int,
    trained: Iterable[str] = (),
    rule: Staleness = Staleness(4),  # noqa: B008
    history: History = HISTORY,
    gone: Mapping[PolicyVersion, str] = {},
) -> Replay:
    return plan(records, deliveries, step, SeenTasks(9, dict.fromkeys(trained, "trained")), rule, history, gone)


OPEN = [delivery(n) for n in range(8)]


def ids(deliveries: tuple[GroupDelivery, ...]) -> list[str]:
    return [d.group.task_id for d in deliveries]


def test_steps_after_the_checkpoint_are_made_again_entry_by_entry() -> None:
    replay = plan_replay([record(5, 3, 1), record(6, 2, 0)], OPEN[:6], 4)
    assert [(ids(batch.deliveries), batch.version) for batch in replay.batches] == [
        (["t3", "t1"], PolicyVersion(1, 5)),
        (["t2", "t0"], PolicyVersion(1, 6)),
    ]
    assert [batch.lags for batch in replay.batches] == [(1, 1), (2, 2)]
    assert ids(replay.fresh) == ["t4", "t5"]
    assert (replay.settled, replay.fork) == ((), "")


def test_what_the_checkpoint_contains_is_settled_and_not_trained_again() -> None:
    replay = plan_replay([record(5, 2, stale=(3,))], OPEN[:5], 4, ["t0", "t1"])
    assert [(e.task_id, e.verdict, e.reason) for e in replay.settled] == [
        ("t0", "trained", ""),
        ("t1", "trained", ""),
        ("t3", "stale", "lag 9"),
    ]
    assert ids(replay.fresh) == ["t4"]


def test_a_step_whose_groups_are_gone_ends_the_replay_and_frees_the_rest() -> None:
    replay = plan_replay([record(5, 0), record(6, 1, 9), record(7, 2)], OPEN[:4], 4)
    assert [batch.version.step for batch in replay.batches] == [5]
    assert replay.fork == "step 6 lacks 1 of its 2 groups"
    assert ids(replay.fresh) == ["t1", "t2", "t3"]


def test_a_hole_in_the_log_ends_the_replay() -> None:
    replay = plan_replay([record(6, 0)], OPEN[:2], 4)
    assert (replay.batches, replay.fork) == ((), "step 5 is not in the log")
    assert ids(replay.fresh) == ["t0", "t1"]


RESTORED = [record(5, 0), StepRecord(PolicyVersion(1, 6), (), PolicyVersion(1, 2)), record(7, 1)]


def test_a_rollback_is_made_again_where_its_weights_are_still_there() -> None:
    replay = plan_replay(RESTORED, OPEN[:3], 4, gone={PolicyVersion(1, 3): "freed"})
    assert [(ids(batch.deliveries), batch.restored) for batch in replay.batches] == [
        (["t0"], None),
        ([], PolicyVersion(1, 2)),
        (["t1"], None),
    ]
    assert replay.batches[1].record == RESTORED[1]
    assert (ids(replay.fresh), replay.fork) == (["t2"], "")


def test_a_rollback_whose_weights_are_gone_ends_the_replay() -> None:
    replay = plan_replay(RESTORED, OPEN[:3], 4, gone={PolicyVersion(1, 2): "version 1.2 was freed"})
    assert [batch.version.step for batch in replay.batches] == [5]
    assert replay.fork == "step 6 restored weights that cannot be had again: version 1.2 was freed"
    assert ids(replay.fresh) == ["t1", "t2"]


@given(st.permutations(range(8)), st.sets(st.integers(0, 7)), st.sets(st.integers(0, 7)))
def test_every_open_group_goes_exactly_one_way(order: list[int], lost: set[int], trained: set[int]) -> None:
    there = [delivery(n) for n in range(8) if n not in lost]
    logged = [n for n in order if n not in trained]
    records = [record(5 + i, *logged[2 * i : 2 * i + 2]) for i in range(len(logged) // 2)]
    replay = plan_replay(records, there, 4, [f"t{n}" for n in trained])
    ways = [e.task_id for e in replay.settled] + ids(replay.fresh)
    ways += [task for batch in replay.batches for task in ids(batch.deliveries)]
    assert sorted(ways) == sorted(d.group.task_id for d in there)


def test_tokens_that_were_masked_are_masked_again_as_the_incarnation_knew_it() -> None:
    """Step 6 was made by the first incarnation, step 7 by the second, which had forked at 5."""
    history = History({1: Reign(0, 9), 2: Reign(5, 7), 3: Reign(7, 7)})
    old = [GroupDelivery(f"{n}-0", 1, group(trajectory(6), trajectory(5), task_id=f"t{n}")) for n in range(2)]
    records = [record(7, 0), replace(record(8, 1), version=PolicyVersion(2, 8))]
    replay = plan_replay(records, old, 6, rule=Staleness(2, mask=True), history=history)
    assert [batch.masked for batch in replay.batches] == [0, 1], "6 is 1 behind for the first, 3 for the second"
    assert [batch.lags for batch in replay.batches] == [(1,), (2,)]
    assert [batch.version for batch in replay.batches] == [PolicyVersion(1, 7), PolicyVersion(2, 8)]


def test_every_verdict_of_the_checkpoint_is_settled_again() -> None:
    replay = plan([], OPEN[:2], 4, SeenTasks(9, {"t1": "stale"}), Staleness(4), HISTORY, {})
    assert [(e.task_id, e.verdict, e.entry_id) for e in replay.settled] == [("t1", "stale", "1-0")]
