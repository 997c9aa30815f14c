"""The turns that a producer's engine takes on a device that others use, too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from broker.api import RunRecord
from broker.connect import Run, connect_run, connect_runs
from broker.turns import Device
from headrace.errors import EngineError
from producers.turns import Turns
from tests.support import wait_until

LEASE_S = 60.0


class Engine:
    """What turns ask of one."""

    def __init__(self) -> None:
        self.has = True
        self.log: list[str] = []
        self.drained = asyncio.Event()
        self.drained.set()
        self.broken = False

    async def release(self) -> None:
        if self.broken:
            raise EngineError("it broke")
        await self.drained.wait()
        self.has = False
        self.log.append("release")

    def resume(self) -> None:
        self.has = True
        self.log.append("resume")


@pytest.fixture
async def port(record: RunRecord) -> AsyncIterator[Run]:
    url = f"memory:{record.run_id}"
    runs = connect_runs(url)
    await runs.create(record)
    yield connect_run(url, record.run_id)
    await runs.delete(record.run_id)


@pytest.fixture
def engine() -> Engine:
    return Engine()


@asynccontextmanager
async def taking(port: Run, engine: Engine, waits: Callable[[bool], None] = lambda told: None) -> AsyncIterator[Turns]:
    turns, over = Turns(Device(port, "gpu", "p1", LEASE_S), engine), asyncio.Event()
    turns.on_wait = waits
    async with asyncio.TaskGroup() as group:
        group.create_task(turns.run(over))
        group.create_task(turns.device.follow(over))
        yield turns
        over.set()
    assert await port.step_aside("gpu", "trainer") == ()


async def test_it_takes_a_turn_once_it_is_asked_and_ends_it_once_others_want_it(port: Run, engine: Engine) -> None:
    async with taking(port, engine) as turns:
        await wait_until(lambda: engine.log == ["release"], "it begins without the device")
        assert await port.line_up("gpu", "trainer", LEASE_S) == ("trainer",)
        await port.step_aside("gpu", "trainer")
        with turns.asking():
            await wait_until(lambda: engine.has, "it has a turn")
            engine.drained.clear()
            line = await port.line_up("gpu", "trainer", LEASE_S)
            assert line[1] == "trainer"
            await asyncio.sleep(0.02)
            assert (await port.line_up("gpu", "trainer", LEASE_S)) == line, "what decodes is finished first"
            engine.drained.set()

            async def gone() -> bool:
                return (await port.line_up("gpu", "trainer", LEASE_S))[0] == "trainer"

            await wait_until(gone, "the trainer has its turn")
            assert not engine.has
            await port.step_aside("gpu", "trainer")
            await wait_until(lambda: engine.has, "it has the next turn")
    assert engine.log[:4] == ["release", "resume", "release", "resume"]


async def test_a_turn_that_nobody_else_wants_goes_on_between_requests(port: Run, engine: Engine) -> None:
    async with taking(port, engine) as turns:
        await wait_until(lambda: not engine.has, "it begins without the device")
        for _ in range(3):
            with turns.asking():
                await wait_until(lambda: engine.has, "it has its turn")
        assert engine.log == ["release", "resume"]
        await port.line_up("gpu", "trainer", LEASE_S)
        await wait_until(lambda: not engine.has, "it is given up although nothing is asked")


async def test_it_says_when_it_waits_and_leaves_the_line_when_nobody_asks_any_more(port: Run, engine: Engine) -> None:
    told: list[bool] = []
    await port.line_up("gpu", "trainer", LEASE_S)
    async with taking(port, engine, told.append) as turns:
        with turns.asking():
            await wait_until(lambda: told[-1:] == [True], "it says that it waits")

        async def left() -> bool:
            return await port.line_up("gpu", "trainer", LEASE_S) == ("trainer",)

        await wait_until(left, "it does not stand in line any more")
        assert told[-1] is False
    assert engine.log == ["release"]


async def test_an_engine_that_breaks_keeps_nobody_waiting(port: Run, engine: Engine) -> None:
    async def breaks() -> None:
        async with taking(port, engine) as turns:
            await wait_until(lambda: not engine.has, "it begins without the device")
            with turns.asking():
                await wait_until(lambda: engine.has, "it has its turn")
                engine.broken = True
                await port.line_up("gpu", "trainer", LEASE_S)
                await asyncio.sleep(60)

    with pytest.raises(ExceptionGroup) as broken:
        await breaks()
    assert [str(error) for error in broken.value.exceptions] == ["it broke"]
    assert await port.line_up("gpu", "trainer", LEASE_S) == ("trainer",)
