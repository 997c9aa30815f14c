"""Groups that end before all of their members have: at the task's deadline, or because nobody can use them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from broker.messages import Group, TaskDelivery
from broker.validate import Limits, check_group
from headrace.errors import ServiceError
from producers.engines.scripted import ScriptedEngine
from producers.environments.api import Done, Rollout, Turn
from producers.environments.calls import Calls, RolloutFailed
from producers.group import play_group
from producers.in_play import InPlay
from producers.rewards.worker import Score
from tests.rollouts import FIRST, TASK, Chats, Chatty, Scores, player, stage
from tests.support import wait_until

DELIVERY = TaskDelivery("1-0", 1, TASK)
LONG_S = 60.0


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    engine = ScriptedEngine(slots=3, context_length=200, length_mean=6.0)
    await engine.start()
    await engine.commit(FIRST)
    yield engine
    await engine.close()


class Some(Chatty):
    """Plays on only when it may: the first `free` episodes do, the others wait for ever."""

    begun = 0

    def __init__(self, free: int) -> None:
        super().__init__(1)
        self.hangs = Some.begun >= free
        Some.begun += 1

    async def step(self, turn: Turn) -> Done:
        if self.hangs:
            await asyncio.Event().wait()
        return Done()


class Slow(Scores):
    """Never scores."""

    async def score(self, name: str, kind: str, rollout: Rollout) -> Score:
        await asyncio.Event().wait()
        raise AssertionError


async def cut(engine: ScriptedEngine, *, free: int, scored: int, scorer: Scores) -> tuple[Group, InPlay]:
    """A group whose deadline passes once all are decoded, and so many have ended or are being scored."""
    Some.begun, in_play = 0, InPlay(4)
    here = stage(player(engine, deadline_s=LONG_S), Chats(lambda index, seed: Some(free)), scorer)
    playing = asyncio.create_task(play_group(here, DELIVERY, in_play, LONG_S))
    await wait_until(lambda: sum(seat.at != "play" for seat in in_play.seats) == scored, f"{scored} have played")
    await wait_until(lambda: all(seat.transcript.sampled for seat in in_play.seats), "all are decoded")
    in_play.expire(engine)
    group = await playing
    assert (in_play.playing, in_play.scoring, engine.stats().busy_slots) == (0, 0, 0)
    assert check_group(group, Limits(256, {"train": 4})) is None
    return group, in_play


async def test_at_the_deadline_what_is_scored_is_a_group(engine: ScriptedEngine) -> None:
    group, in_play = await cut(engine, free=2, scored=2, scorer=Scores())
    assert (group.outcome, len(group.trajectories)) == ("played", 2)
    assert group.failures == ("the task's deadline passed: it was still playing",) * 2
    assert in_play.sampled(engine) > sum(int(member.loss_mask_T.sum()) for member in group.trajectories)


async def test_at_the_deadline_too_few_are_a_failed_group(engine: ScriptedEngine) -> None:
    group, _ = await cut(engine, free=1, scored=1, scorer=Scores())
    assert group.outcome == "failed"
    assert group.error == "3 of 4 rollouts failed: the task's deadline passed: it was still playing"


async def test_a_score_that_does_not_come_is_cut_at_the_deadline(engine: ScriptedEngine) -> None:
    group, _ = await cut(engine, free=4, scored=4, scorer=Slow())
    assert group.error == "4 of 4 rollouts failed: the task's deadline passed: it was still being scored"


async def test_a_deadline_that_has_passed_fails_the_group_at_once(engine: ScriptedEngine) -> None:
    here = stage(player(engine, deadline_s=LONG_S), Chats(lambda index, seed: Some(0)), Scores())
    Some.begun, in_play = 0, InPlay(4)
    group = await play_group(here, DELIVERY, in_play, 0.0)
    assert group.failures == ("the task's deadline passed: it was still playing",) * 4
    assert (in_play.playing, engine.stats().busy_slots, engine.stats().waiting) == (0, 0, 0)


async def test_a_stopped_group_is_stale_and_frees_its_slots() -> None:
    engine = ScriptedEngine(slots=3, context_length=200, length_mean=1000.0, length_sigma=0.0, step_s=0.002)
    await engine.start()
    await engine.commit(FIRST)
    in_play = InPlay(4)
    here = stage(player(engine, max_new_tokens=190), Chats(lambda index, seed: Chatty(1)), Scores())
    playing = asyncio.create_task(play_group(here, DELIVERY, in_play, LONG_S))
    await wait_until(lambda: engine.stats().decoded_tokens >= 6, "two steps are decoded")
    in_play.stop("too old", engine)
    group = await playing
    assert (group.outcome, group.error, group.trajectories, group.failures) == ("stale", "too old", (), ())
    assert sorted(group.stopped_N)[0] == 0, "one waited for a slot"
    assert 6 <= sum(group.stopped_N) == in_play.sampled(engine) <= engine.stats().decoded_tokens
    assert (engine.stats().busy_slots, engine.stats().waiting) == (0, 0)
    assert check_group(group, Limits(256, {"train": 4})) is None
    await engine.close()


class Clinging(Chatty):
    """Does not end when it is cancelled, and closes for ever."""

    def __init__(self, released: asyncio.Event) -> None:
        super().__init__(1)
        self.released = released

    async def step(self, turn: Turn) -> Done:
        return await self._cling()

    async def close(self) -> None:
        await self._cling()

    async def _cling(self) -> Done:
        while not self.released.is_set():
            try:
                await self.released.wait()
            except asyncio.CancelledError:
                continue
        return Done()


async def test_an_environment_that_clings_holds_up_nobody_and_is_counted(engine: ScriptedEngine) -> None:
    released = asyncio.Event()
    here = player(engine, deadline_s=0.05)
    group = await play_group(
        stage(here, Chats(lambda index, seed: Clinging(released)), Scores()), DELIVERY, InPlay(4), LONG_S
    )
    assert group.failures == ("environment took longer than 0.05 s",) * 4
    assert here.calls.left == 8, "a step and a close of each"
    released.set()
    await wait_until(lambda: here.calls.left == 0, "all calls have ended")


async def test_too_many_calls_that_never_end_are_an_error_of_the_service() -> None:
    released, calls = asyncio.Event(), Calls(0.01, most_left=1)
    for _ in range(2):
        with pytest.raises(RolloutFailed, match="took longer"):
            await calls.ask("environment 'it'", Clinging(released).close)
    with pytest.raises(ServiceError, match="2 calls of environment 'it' and others go on although they were cancelled"):
        await calls.ask("environment 'it'", Clinging(released).close)
    released.set()
    await wait_until(lambda: calls.left == 0, "all calls have ended")
