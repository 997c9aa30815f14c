"""The line for a device: one has it at a time, the dead lose it, the living lose it to nobody, whatever Redis does."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from broker import bounds
from broker.api import RunRecord, ServicePort
from broker.connect import Run
from broker.keys import Keys
from broker.turns import Device
from tests.conftest import Services
from tests.servers import RedisProcess
from tests.sites import PATIENT, Site
from tests.support import wait_until

LEASE_S = 60.0
SHORT_S = 0.4


async def test_who_came_first_has_it_and_then_the_next(service: Services) -> None:
    a, b, c = service(), service(), service()
    assert await a.line_up("gpu", "a", LEASE_S) == ("a",)
    assert await b.line_up("gpu", "b", LEASE_S) == ("a", "b")
    assert await a.line_up("gpu", "a", LEASE_S) == ("a", "b"), "a place is kept"
    assert await c.line_up("other", "c", LEASE_S) == ("c",)
    assert await b.step_aside("gpu", "nobody") == ("a", "b")
    assert await a.step_aside("gpu", "a") == ("b",)
    assert await a.line_up("gpu", "a", LEASE_S) == ("b", "a")
    assert await c.wait_line("gpu", (), 0) == ("b", "a")


async def test_one_who_dies_loses_it_with_its_lease(service: Services) -> None:
    a, b = service(), service()
    await a.line_up("gpu", "a", SHORT_S)
    await b.line_up("gpu", "b", LEASE_S)

    async def is_next() -> bool:
        return await b.line_up("gpu", "b", LEASE_S) == ("b",)

    assert not await is_next()
    await wait_until(is_next, "the lease of the dead runs out")
    assert await a.line_up("gpu", "a", SHORT_S) == ("b", "a"), "who comes late stands behind"


async def test_a_lease_that_ran_out_while_nobody_looked_is_kept(service: Services) -> None:
    a = service()
    await a.line_up("gpu", "a", 0.001)
    await asyncio.sleep(0.05)
    assert await a.line_up("gpu", "a", LEASE_S) == ("a",)


async def test_one_who_waits_is_woken(
    service: Services, patient: Run, somebody_waits: Callable[[], Awaitable[bool]]
) -> None:
    a = service()
    await a.line_up("gpu", "a", LEASE_S)
    seen = await patient.line_up("gpu", "b", LEASE_S)
    for move, line in ((a.step_aside("gpu", "a"), ("b",)), (a.line_up("gpu", "a", LEASE_S), ("b", "a"))):
        waiting = asyncio.create_task(patient.wait_line("gpu", seen, 60_000))
        await wait_until(somebody_waits, "the other waits")
        await move
        seen = await asyncio.wait_for(waiting, 20)
        assert seen == line


async def test_a_line_that_does_not_move_is_answered_in_time(service: Services) -> None:
    a = service()
    await a.line_up("gpu", "a", LEASE_S)
    assert await a.wait_line("gpu", ("a",), 20) == ("a",)


@asynccontextmanager
async def used(port: ServicePort, name: str, lease_s: float = LEASE_S) -> AsyncIterator[Device]:
    device, over = Device(port, "gpu", name, lease_s), asyncio.Event()
    following = asyncio.create_task(device.follow(over))
    yield device
    over.set()
    await device.give_up()
    await asyncio.wait_for(following, 20)


async def test_a_device_is_used_by_one_at_a_time_and_nobody_starves(service: Services) -> None:
    uses: list[str] = []
    inside = 0

    async def use(device: Device, name: str) -> None:
        nonlocal inside
        for _ in range(8):
            assert await device.take()
            inside += 1
            await asyncio.sleep(0.005)
            assert inside == 1
            uses.append(name)
            inside -= 1
            await device.give_up()

    first = service()
    await first.line_up("gpu", "first", LEASE_S)

    async def both_wait() -> bool:
        return len(await first.line_up("gpu", "first", LEASE_S)) == 3

    async with used(service(), "a") as a, used(service(), "b") as b, asyncio.TaskGroup() as group:
        group.create_task(use(a, "a"))
        group.create_task(use(b, "b"))
        await wait_until(both_wait, "both stand in line")
        await first.step_aside("gpu", "first")
    assert sorted(uses[:2]) == ["a", "b"]
    assert uses == uses[:2] * 8, "who has had it stands behind the other"


async def test_who_has_it_is_told_that_others_want_it(service: Services) -> None:
    async with used(service(), "a") as a, used(service(), "b") as b:
        assert await a.take()
        assert not a.wanted.is_set()
        waiting = asyncio.create_task(b.take())
        await asyncio.wait_for(a.wanted.wait(), 20)
        assert not waiting.done()
        await a.give_up()
        assert await asyncio.wait_for(waiting, 20)
        assert not a.wanted.is_set()
        assert not b.wanted.is_set()


async def test_one_who_does_not_want_to_wait_any_more_leaves_the_line(service: Services) -> None:
    async with used(service(), "a") as a, used(service(), "b") as b:
        assert await a.take()
        assert not await b.take(lambda: True)
        await b.give_up()
        await asyncio.wait_for(wait_until(lambda: not a.wanted.is_set(), "nobody waits"), 20)


async def test_one_who_hangs_finds_out_that_it_was_lost(service: Services) -> None:
    async with used(service(), "b") as b:
        a = Device(service(), "gpu", "a", SHORT_S)
        assert await a.take()
        # It does not follow: as a process that hangs.
        assert await asyncio.wait_for(b.take(), 20)
        over = asyncio.Event()
        following = asyncio.create_task(a.follow(over))
        await asyncio.wait_for(a.wanted.wait(), 20)
        assert not await a.take(lambda: True)
        over.set()
        await a.give_up()
        await asyncio.wait_for(following, 20)


@pytest.fixture
async def site(redis_process: Callable[..., RedisProcess], record: RunRecord) -> AsyncIterator[Site]:
    site = await Site(redis_process(*PATIENT), record).begin()
    yield site
    await site.close()


async def test_nobody_loses_it_because_redis_stood_still(site: Site) -> None:
    holder, other = site.trainer, await site.producer("other", 1.0)
    assert await holder.line_up("gpu", "a", 1.0) == ("a",)
    assert await other.line_up("gpu", "b", 1.0) == ("a", "b")
    with site.admin() as client:
        pid = client.info("server")["process_id"]
    os.kill(pid, signal.SIGSTOP)
    await asyncio.sleep(2.5)
    os.kill(pid, signal.SIGCONT)
    assert (await other.line_up("gpu", "b", 1.0))[0] == "a"
    assert (await holder.line_up("gpu", "a", 1.0))[0] == "a"


async def test_it_is_kept_while_redis_is_full_and_leaves_no_more_than_its_bound(site: Site) -> None:
    with site.admin() as client:
        client.config_set("maxmemory", 1)
        assert await site.trainer.line_up("gpu", "a", 60.0) == ("a",)
        assert await site.trainer.step_aside("gpu", "a") == ()
        client.config_set("maxmemory", 0)
        for _ in range(2 * bounds.MAX_MOVES):
            await site.trainer.line_up("gpu", "a", 60.0)
            await site.trainer.step_aside("gpu", "a")
        keys = Keys(site.record.run_id)
        assert client.xlen(keys.of("moves")) <= bounds.MAX_MOVES + 100
        client.hset(keys.of("places"), "gpu nonsense", "of nobody")
        assert await site.trainer.line_up("gpu", "a", 60.0) == ("a",)
