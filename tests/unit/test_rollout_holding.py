from __future__ import annotations

from dataclasses import replace

import pytest

from broker.messages import TaskDelivery
from headrace.version import PolicyVersion
from producers.backlog import room
from producers.capacity import Capacity
from producers.holding import Held, may_start, phase
from producers.in_play import InPlay
from tests.support import make_task

OLD, NEW = PolicyVersion(1, 4), PolicyVersion(2, 0)


def held(playing: int = 0, scoring: int = 0, waits: bool = False) -> Held:
    in_play = InPlay(playing + scoring)
    for seat in in_play.seats[playing:]:
        in_play.move(seat, "score")
    return Held(TaskDelivery("1-0", 1, make_task("t")), in_play, 10.0, waits)


def test_a_task_starts_on_its_version_or_a_newer_one_and_an_evaluation_on_its_own_alone() -> None:
    task = replace(make_task("t"), min_version=NEW)
    versions = (None, OLD, NEW, PolicyVersion(2, 1))
    assert [may_start(version, task) for version in versions] == [False, False, True, True]
    exact = replace(task, kind="eval")
    assert [may_start(version, exact) for version in versions] == [False, False, True, False]


def test_room_is_what_the_slots_leave_and_nothing_while_a_version_is_missing() -> None:
    capacity = Capacity(slots=8, group_size=4)
    assert room([], OLD, capacity) == 3
    assert room([held(4), held(4)], OLD, capacity) == 1
    assert room([held(4), held(4), held(4)], OLD, capacity) == 0
    assert room([], None, capacity) == 0
    assert room([held(4, waits=True)], OLD, capacity) == 0
    assert room([held()] * capacity.most_decoded, OLD, capacity) == 0
    lost = held(4)
    lost.lost = True
    assert room([held(4), held(4), lost], OLD, capacity) == 1


@pytest.mark.parametrize(
    ("tasks", "version", "outage", "expected"),
    [
        ([], None, False, "wait_start"),
        ([held(4)], None, False, "wait_start"),
        ([], OLD, False, "wait_no_task"),
        ([held(1), held(0, 3)], OLD, False, "play"),
        ([held(4, waits=True), held(1)], OLD, False, "play"),
        ([held(4, waits=True), held(0, 1)], OLD, False, "wait_behind_on_weights"),
        ([held(0, 1), held()], OLD, False, "wait_scores"),
        ([held()], OLD, False, "wait_backpressure"),
        ([], None, True, "wait_broker"),
        ([], OLD, True, "wait_broker"),
        ([held(1)], OLD, True, "play"),
        ([held(4, waits=True)], OLD, True, "wait_broker"),
        ([held(0, 1)], OLD, True, "wait_scores"),
    ],
)
def test_the_phase_of_the_whole(tasks: list[Held], version: PolicyVersion | None, outage: bool, expected: str) -> None:
    assert phase(tasks, version, outage) == expected
