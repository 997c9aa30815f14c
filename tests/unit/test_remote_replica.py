"""What becomes of a server that fails an update, by how far that was."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from headrace.version import PolicyVersion
from producers.engines.remote.answers import Generated
from producers.engines.remote.http import ServerGone
from producers.engines.remote.job import Job
from producers.engines.remote.options import ServerOptions
from producers.engines.remote.replica import Offer, Replica
from producers.engines.remote.spans import Labels
from producers.engines.remote.updating import UpdateFailed, Way, failing, standing_still
from tests.support import wait_until

FIRST, SECOND, THIRD = (Offer(PolicyVersion(1, step), None) for step in range(3))
REFUSED = UpdateFailed("it refuses", half_way=False)


class Scripted(Replica):
    """Whose server does what it is told here."""

    def __init__(self, restarts: int = 5) -> None:
        options = ServerOptions(poll_s=0.05, restarts=restarts)
        super().__init__("one", options, Labels("run.1"), 8, lambda: None)
        self.fault: Exception | None = None
        self.dead = self.buggy = False
        self.brought: list[tuple[PolicyVersion, bool]] = []
        self.loading, self.looking = asyncio.Event(), asyncio.Event()
        """While one is not set, an update or a look goes on."""
        self.loading.set()
        self.looking.set()
        self.looks = 0

    async def ask(self, job: Job, rid: str, label: str) -> Generated:
        raise NotImplementedError

    async def abort(self, rid: str) -> None:
        raise NotImplementedError

    async def _begin(self) -> None:
        pass

    async def _bring(self, offer: Offer, *, reload: bool) -> float:
        self.brought.append((offer.version, reload))
        await self.loading.wait()
        if self.fault is not None:
            raise self.fault
        self.version = offer.version
        return 1.0

    async def _look(self) -> None:
        self.looks += 1
        await self.looking.wait()
        if self.buggy:
            raise KeyError("a bug")
        if self.dead:
            raise ServerGone("it is gone")

    async def _check(self) -> None:
        pass

    async def _mend(self) -> bool:
        if self.buggy:
            raise KeyError("a bug")
        return True

    async def _end(self) -> None:
        pass


@pytest_asyncio.fixture
async def serving() -> AsyncIterator[Scripted]:
    """On the first version."""
    made = Scripted()
    keeper = asyncio.create_task(made.keep())
    await made.begun.wait()
    await made.offer(FIRST)
    await wait_until(lambda: made.takes, "it serves")
    yield made
    keeper.cancel()
    await asyncio.gather(keeper, return_exceptions=True)


async def test_one_that_was_not_touched_goes_on_with_its_version_and_gets_the_next(serving: Scripted) -> None:
    life, serving.fault = serving.life, REFUSED
    assert await serving.offer(SECOND) == 0.0
    assert (serving.state, serving.version) == ("serving", FIRST.version)
    await wait_until(lambda: serving.takes, "it was looked at, and is given requests")
    serving.fault = None
    assert await serving.offer(THIRD) == 1.0
    assert (serving.state, serving.version) == ("serving", THIRD.version)
    assert not life.done(), "what was open there had to go elsewhere"
    assert serving.brought == [(FIRST.version, True), (SECOND.version, False), (THIRD.version, False)]


async def test_one_that_is_half_way_is_reloaded(serving: Scripted) -> None:
    life, serving.fault = serving.life, UpdateFailed("half of it", half_way=True)
    await serving.offer(SECOND)
    assert (serving.state, serving.why, serving.version) == ("broken", "half of it", None)
    assert life.done()
    serving.fault = None
    await wait_until(lambda: serving.takes, "it was reloaded")
    assert serving.brought[-1] == (SECOND.version, True)


async def test_one_that_was_not_touched_because_it_is_gone_is_found_out(serving: Scripted) -> None:
    serving.fault, serving.dead = REFUSED, True
    await serving.offer(SECOND)
    await wait_until(lambda: serving.state == "broken", "it is found out")
    assert serving.why == "it is gone"


async def test_one_that_refuses_again_and_again_is_not_left_behind_for_ever() -> None:
    made = Scripted(restarts=1)
    keeper = asyncio.create_task(made.keep())
    await made.begun.wait()
    await made.offer(FIRST)
    await wait_until(lambda: made.takes, "it serves")
    made.fault, states = REFUSED, list[str]()
    for _ in range(2):
        await made.offer(SECOND)
        states.append(made.state)
    assert states == ["serving", "broken"]
    await asyncio.wait_for(keeper, 60)
    assert (made.state, made.why) == ("lost", "it failed 2 times in a row, the last time so: it refuses")


async def test_a_server_that_loads_need_not_answer_anything_else(serving: Scripted) -> None:
    before = serving.looks
    serving.looking.clear()
    await wait_until(lambda: serving.looks > before, "it is looked at")
    serving.loading.clear()
    update = asyncio.create_task(serving.offer(SECOND))
    await wait_until(lambda: serving.state == "updating", "it loads")
    serving.dead = True
    serving.looking.set()
    before = serving.looks
    serving.failed(ServerGone("a request"))
    for _ in range(100):
        await asyncio.sleep(0)
    assert serving.looks == before
    serving.dead = False
    serving.loading.set()
    assert await update == 1.0
    await wait_until(lambda: serving.takes, "it was looked at, and serves")
    assert serving.version == SECOND.version


@pytest.mark.parametrize("mending", [False, True])
async def test_a_bug_in_the_loop_that_keeps_a_server_is_heard_of(mending: bool, serving: Scripted) -> None:
    serving.buggy = True
    if mending:
        serving.failed(ServerGone("once"))
        serving._break("it does not work")
    await wait_until(lambda: serving.state == "lost", "it is given up")
    assert serving.why == "this engine failed: KeyError('a bug')"


@pytest.mark.parametrize(("resumes", "half_way"), [(True, False), (False, True)])
async def test_a_server_that_may_stand_still_counts_as_half_way(resumes: bool, half_way: bool) -> None:
    told: list[str] = []

    async def pause() -> None:
        told.append("pause")
        raise ServerGone("no answer")

    async def go_on() -> None:
        told.append("go on")
        if not resumes:
            raise ServerGone("no answer")

    way = Way()
    with pytest.raises(UpdateFailed, match="no answer") as caught:
        async with failing(way, "it", 60.0), standing_still(way, pause, go_on):
            pass
    assert caught.value.half_way == half_way
    assert told == ["pause", "go on"]
