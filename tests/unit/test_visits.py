"""Which version an engine is brought to while evaluations are held, and what begins on it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.messages import TaskDelivery
from headrace.config import Config
from headrace.telemetry.metrics import Metrics
from headrace.version import PolicyVersion
from producers.engines.scripted import ScriptedEngine
from producers.gauges import Gauges
from producers.holding import Held, may_start
from producers.in_play import InPlay
from producers.jobs import Jobs
from producers.visits import pressing, stays, visit
from tests.rollouts import Chats, Chatty, Scores, player, stage
from tests.support import make_task
from weightsync.commits import Commit

OLD, NOW, HEAD = PolicyVersion(1, 3), PolicyVersion(1, 5), PolicyVersion(1, 6)


def held(kind: str, version: PolicyVersion, *, waits: bool = False, playing: int = 2) -> Held:
    in_play = InPlay(2)
    for seat in in_play.seats[playing:]:
        in_play.move(seat, "score")
    task = replace(make_task(f"{kind}-{version}", kind=kind), min_version=version)
    return Held(TaskDelivery("1-0", 1, task), in_play, 10.0, waits)


def test_an_engine_stays_while_an_evaluation_plays() -> None:
    assert stays([held("train", NOW), held("eval", NOW)])
    assert not stays([held("train", NOW), held("eval", OLD, waits=True)])
    assert not stays([held("eval", NOW, playing=0)]), "its scores need no engine"
    lost = held("eval", NOW)
    lost.lost = True
    assert stays([lost]), "it may come again, and its job goes on"


def test_an_earlier_version_is_visited_once_nothing_plays() -> None:
    waiting = held("eval", OLD, waits=True)
    assert visit([waiting], NOW, HEAD) == OLD
    assert visit([waiting, held("train", NOW)], NOW, HEAD) is None, "training is played to its end"
    assert visit([waiting, held("train", NOW, playing=0)], NOW, HEAD) == OLD
    assert visit([waiting, held("train", HEAD, waits=True)], NOW, HEAD) is None, "it waits for the head"
    assert visit([held("eval", NOW)], NOW, HEAD) is None
    assert visit([], NOW, HEAD) is None


def test_a_version_that_the_head_brings_is_not_visited() -> None:
    assert visit([held("eval", HEAD, waits=True)], NOW, HEAD) is None
    assert visit([held("eval", PolicyVersion(1, 7), waits=True)], NOW, HEAD) is None, "it is not sealed yet"
    assert visit([held("eval", NOW, waits=True)], OLD, HEAD) == NOW, "the engine would pass it by"
    assert visit([held("eval", OLD, waits=True)], NOW, None) is None


def test_a_version_that_cannot_be_had_is_not_tried_again() -> None:
    waiting = held("eval", OLD, waits=True)
    waiting.unavailable = "gone"
    assert visit([waiting], NOW, HEAD) is None
    assert pressing([held("eval", OLD, waits=True)])
    assert not pressing([held("eval", OLD), held("train", HEAD, waits=True)])


TASKS = st.lists(
    st.tuples(st.sampled_from(["train", "eval"]), st.integers(0, 8), st.booleans(), st.integers(0, 2)), max_size=6
)


@given(tasks=TASKS, at=st.integers(0, 8), head=st.integers(0, 8))
def test_nothing_that_plays_ever_loses_its_version(tasks: list[tuple[str, int, bool, int]], at: int, head: int) -> None:
    """A visit goes where an evaluation waits, back, and never while anything decodes."""
    here = PolicyVersion(1, at)
    made = [held(kind, PolicyVersion(1, step), waits=waits, playing=playing) for kind, step, waits, playing in tasks]
    wanted = visit(made, here, PolicyVersion(1, head))
    if wanted is None:
        return
    assert wanted != here
    assert wanted.step < head
    assert not stays(made)
    assert not any(task.in_play.playing and not task.waits_for_version for task in made)
    assert any(task.waits_for_version and may_start(wanted, task.delivery.task) for task in made if task.evaluates)


# -- in a producer


class Port:
    """Takes tasks back."""

    def __init__(self) -> None:
        self.returned: list[str] = []
        self.then: Callable[[], object] | None = None

    async def give_back(self, producer: str, entry_ids: list[str]) -> None:
        self.returned += entry_ids
        then, self.then = self.then, None
        if then is not None:
            then()


SAID = Commit(OLD, 0, 0.0, 0.0, 0.0, 0.0)


@pytest.fixture
async def jobs() -> Jobs:
    engine = ScriptedEngine(slots=8)
    await engine.commit(OLD)
    here = stage(player(engine), Chats(lambda index, seed: Chatty(1)), Scores())
    made = Jobs("p1", Port(), here, Config(), Gauges(engine, Metrics("r", "p1"), None), asyncio.Event())  # type: ignore[arg-type]
    made.on_commit(SAID)
    return made


async def commit(jobs: Jobs, version: PolicyVersion) -> None:
    await jobs.stage.player.engine.commit(version)
    jobs.on_commit(replace(SAID, version=version))


def hold(jobs: Jobs, entry: str, kind: str, version: PolicyVersion) -> Held:
    task = replace(make_task(entry, kind=kind), min_version=version)
    made = jobs.hold(TaskDelivery(entry, 1, task), 60.0)
    assert made is not None
    return made


async def test_training_begins_on_the_newest_version_only(jobs: Jobs) -> None:
    await commit(jobs, NOW)
    exact = hold(jobs, "1-0", "eval", OLD)
    assert exact.waits_for_version
    jobs.on_head(NOW)
    assert jobs.visit() == OLD
    await commit(jobs, OLD)
    assert await jobs._caught_up(exact) == ""
    training = hold(jobs, "2-0", "train", OLD)
    assert training.waits_for_version, "this version is only visited"
    await jobs.play(training)
    assert jobs.port.returned == ["2-0"]
    assert list(jobs.held) == ["1-0"]
    assert jobs.room() == 0, "it would take the same task again"
    await commit(jobs, NOW)
    assert jobs.room() > 0
    assert not hold(jobs, "3-0", "train", OLD).waits_for_version


async def test_the_engine_may_leave_once_the_evaluations_have_ended(jobs: Jobs) -> None:
    exact = hold(jobs, "1-0", "eval", OLD)
    assert not exact.waits_for_version
    assert not jobs.leaves()
    assert not hold(jobs, "5-0", "eval", OLD).waits_for_version, "it stays a while longer"
    for held in jobs.held.values():
        for seat in held.in_play.seats:
            held.in_play.move(seat, "score")
    assert jobs.leaves()
    late = hold(jobs, "2-0", "eval", OLD)
    assert late.waits_for_version, "the engine is about to leave this version"
    assert not hold(jobs, "4-0", "train", OLD).waits_for_version
    await commit(jobs, NOW)
    await commit(jobs, OLD)
    assert await jobs._caught_up(late) == ""


async def test_a_training_task_that_waits_is_passed_on_once_an_evaluation_plays(jobs: Jobs) -> None:
    training = hold(jobs, "1-0", "train", NOW)
    playing = asyncio.create_task(jobs.play(training))
    await asyncio.sleep(0)
    exact = hold(jobs, "2-0", "eval", OLD)
    assert await jobs._caught_up(exact) == ""
    await asyncio.wait_for(playing, 5)
    assert (jobs.port.returned, list(jobs.held)) == (["1-0"], ["2-0"])


async def test_no_training_begins_on_a_version_that_stays_until_it_is_stale(jobs: Jobs) -> None:
    exact = hold(jobs, "1-0", "eval", OLD)
    assert await jobs._caught_up(exact) == ""
    jobs.on_head(PolicyVersion(1, OLD.step + jobs.config.staleness.max_lag - 1))
    assert not hold(jobs, "2-0", "train", OLD).waits_for_version
    jobs.on_head(PolicyVersion(1, OLD.step + jobs.config.staleness.max_lag))
    assert hold(jobs, "3-0", "train", OLD).waits_for_version
    exact.in_play.clear()
    assert not hold(jobs, "4-0", "train", OLD).waits_for_version, "nothing keeps it from the newest version"


async def test_a_task_that_comes_again_while_it_is_given_back_is_given_back_again(jobs: Jobs) -> None:
    exact = hold(jobs, "1-0", "eval", OLD)
    assert await jobs._caught_up(exact) == ""
    training = hold(jobs, "2-0", "train", NOW)
    jobs.port.then = lambda: jobs.hold(replace(training.delivery, entry_id="3-0"), 60.0)
    await jobs.play(training)
    assert (jobs.port.returned, list(jobs.held)) == (["2-0", "3-0"], ["1-0"])


async def test_an_evaluation_whose_version_is_gone_says_so(jobs: Jobs) -> None:
    await commit(jobs, NOW)
    exact, other = hold(jobs, "1-0", "eval", OLD), hold(jobs, "2-0", "eval", HEAD)
    waits = asyncio.create_task(jobs._caught_up(exact))
    await asyncio.sleep(0)
    jobs.unavailable(OLD)
    assert await waits == "version 1.3 cannot be had here any more"
    assert other.waits_for_version
    assert not other.unavailable
