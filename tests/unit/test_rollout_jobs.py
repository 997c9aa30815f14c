"""What becomes of the jobs of a producer when the broker forgets, repeats or takes away, decided without one."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from broker.messages import TaskDelivery
from headrace.config import Config
from headrace.telemetry.metrics import Metrics
from headrace.version import PolicyVersion
from producers.engines.scripted import ScriptedEngine
from producers.gauges import Gauges
from producers.holding import Held
from producers.jobs import Jobs
from tests.rollouts import Chats, Chatty, Scores, player, stage
from tests.support import make_task

VERSION = PolicyVersion(1, 0)
TASK = make_task("t1", group_size=4)
FIRST = TaskDelivery("1-0", 1, TASK)


@pytest.fixture
async def jobs() -> Jobs:
    """With slots for eight rollouts, of which nothing is played: jobs are tasks that wait for ever."""
    engine = ScriptedEngine(slots=8)
    await engine.commit(VERSION)
    here = stage(player(engine), Chats(lambda index, seed: Chatty(1)), Scores())
    gauges = Gauges(engine, Metrics("r", "p1"), None)
    return Jobs("p1", None, here, Config(), gauges, asyncio.Event())  # type: ignore[arg-type]


def begin(jobs: Jobs, delivery: TaskDelivery) -> Held:
    held = jobs.hold(delivery, 60.0)
    assert held is not None
    held.job = asyncio.create_task(asyncio.Event().wait())  # type: ignore[arg-type]
    return held


async def ended(held: Held) -> bool:
    assert held.job is not None
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return held.job.cancelled()


@pytest.mark.parametrize(
    "again",
    [FIRST, replace(FIRST, attempt=3), replace(FIRST, entry_id="2-0"), TaskDelivery("2-0", 2, TASK)],
    ids=["the same", "later attempt", "other entry", "given back"],
)
async def test_a_task_that_comes_again_is_the_running_jobs(jobs: Jobs, again: TaskDelivery) -> None:
    held = begin(jobs, FIRST)
    jobs.lose(["1-0"])
    assert jobs.hold(again, 60.0) is None
    assert jobs.held == {again.entry_id: held}
    assert (held.delivery, held.lost) == (again, False)
    assert not await ended(held)


async def test_a_second_entry_of_a_task_is_held_beside_the_first(jobs: Jobs) -> None:
    held = begin(jobs, FIRST)
    second, again = replace(FIRST, entry_id="2-0"), replace(FIRST, attempt=2)
    assert jobs.hold(second, 60.0) is None
    assert (jobs.held, jobs.entry_ids) == ({"2-0": held}, ["1-0", "2-0"])
    assert jobs.hold(again, 60.0) is None
    assert (held.delivery, held.earlier) == (again, [second])
    jobs.lose(["1-0"])
    assert (jobs.held, held.delivery, held.earlier, held.lost) == ({"2-0": held}, second, [], False)
    jobs.lose(["2-0"])
    jobs.lose(["2-0"])
    assert await ended(held)
    assert jobs.held == {}


async def test_another_task_of_the_same_name_is_played_beside_it_until_one_is_lost(jobs: Jobs) -> None:
    old = begin(jobs, FIRST)
    new = begin(jobs, TaskDelivery("2-0", 1, replace(TASK, seed=8)))
    assert jobs.held == {"1-0": old, "2-0": new}
    jobs.lose(["1-0"])
    jobs.lose(["1-0"])
    assert jobs.held == {"2-0": new}
    assert await ended(old)
    assert not await ended(new)


async def test_a_lost_task_has_a_moment_to_come_again(jobs: Jobs) -> None:
    lost, kept = begin(jobs, FIRST), begin(jobs, TaskDelivery("2-0", 1, make_task("t2", group_size=4)))
    room = jobs.room()
    jobs.lose(["1-0"])
    assert jobs.room() > room, "it takes no room meanwhile"
    jobs.lose([])
    assert (jobs.room(), lost.lost) == (room, False)
    jobs.lose(["1-0"])
    assert not await ended(lost)
    jobs.lose(["1-0"])
    assert await ended(lost)
    assert jobs.held == {"2-0": kept}


async def test_what_is_being_published_is_not_lost(jobs: Jobs) -> None:
    held = begin(jobs, FIRST)
    held.publishing = True
    jobs.lose(["1-0"])
    jobs.lose(["1-0"])
    assert not await ended(held)
    assert jobs.held == {"1-0": held}


async def test_a_task_that_is_held_back_begins_once_scores_come_and_not_while_it_is_lost(jobs: Jobs) -> None:
    jobs.config = Config.model_validate({"environments": [{"name": "arithmetic"}, {"name": "guess_number"}]})
    behind = [begin(jobs, TaskDelivery(f"{n}-0", 1, make_task(f"t{n}", group_size=4))) for n in (2, 3)]
    for held in behind:
        for seat in held.in_play.seats:
            held.in_play.move(seat, "score")
    late = begin(jobs, FIRST)
    letting = asyncio.create_task(jobs._let_in(late))
    await asyncio.sleep(0)
    assert late.held_back
    # All that the producer holds is lost at once when the broker has lost its tail.
    jobs.lose(["1-0", "2-0", "3-0"])
    await asyncio.sleep(0)
    assert not letting.done()
    jobs.lose([])
    behind[0].in_play.clear()
    assert await letting == ""
    assert not late.held_back


async def test_a_task_may_begin_although_all_of_its_environment_are_lost(jobs: Jobs) -> None:
    """It waited for a version when they were."""
    held = begin(jobs, FIRST)
    jobs.lose(["1-0"])
    assert await jobs._let_in(held) == ""
