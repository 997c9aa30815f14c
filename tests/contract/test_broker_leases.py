"""Leases: the dead are noticed in time by those who wait, the living are robbed by nobody, whatever Redis does."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Callable

import pytest

from broker.api import Peer, RunRecord
from broker.keys import Keys
from headrace.version import PolicyVersion
from tests.conftest import Services
from tests.reigns import begun
from tests.servers import ONE_SERVER, RedisProcess
from tests.sites import PATIENT, Site
from tests.support import make_group, wait_until

LEASE_S = 1.0


@pytest.fixture
async def site(redis_process: Callable[..., RedisProcess], record: RunRecord) -> AsyncIterator[Site]:
    site = await Site(redis_process(*PATIENT), record).begin()
    yield site
    await site.close()


class Living:
    """A producer that holds a task and renews its lease, as fast as Redis lets it."""

    def __init__(self, site: Site, name: str, task_id: str) -> None:
        self.site, self.name, self.task_id = site, name, task_id
        self.lost: list[str] = []

    async def __aenter__(self) -> Living:
        self.port = await self.site.producer(self.name, LEASE_S)
        (self.delivery,) = await self.port.take(self.name, 1, 0)
        assert self.delivery.task.task_id == self.task_id
        self._over, self._hangs = asyncio.Event(), False
        self._loop = asyncio.create_task(self._renew())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._over.set()
        await self._loop

    async def _renew(self) -> None:
        while not (self._over.is_set() or self._hangs):
            await self.port.heartbeat(Peer(self.name, "producer", "host", 1, True, {}), LEASE_S)
            self.lost += await self.port.renew(self.name, [self.delivery.entry_id])
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), LEASE_S / 8)

    async def hang(self) -> None:
        """It asks nothing from now on, until it goes on; what it has asked already is forgotten."""
        # The client may lose a cancellation.
        self._hangs = True
        self._loop.cancel()
        await asyncio.wait([self._loop])

    def go_on(self) -> None:
        self._hangs = False
        self._loop = asyncio.create_task(self._renew())

    async def publish(self) -> str:
        group = make_group(self.delivery.task, self.delivery.attempt, self.name)
        return await self.port.publish(self.name, self.delivery, group)


async def looks_for(site: Site, seconds: float) -> list[str]:
    """What another producer gets that asks all the time."""
    other, end, got = await site.producer("other", LEASE_S), time.monotonic() + seconds, []
    while time.monotonic() < end:
        got += [delivery.task.task_id for delivery in await other.take("other", 4, 50)]
    return got


async def test_one_who_waits_notices_that_a_lease_has_run_out(service: Services, record: RunRecord) -> None:
    trainer, dead, alive = service(), service(), service()
    await begun(trainer, "a")
    await dead.heartbeat(Peer("dead", "producer", "host", 1, True, {}), 0.3)
    await dead.take("dead", 1, 0)
    await alive.heartbeat(Peer("alive", "producer", "host", 1, True, {}), 0.6)
    # Nothing else wakes it: no task is admitted.
    (taken,) = await asyncio.wait_for(alive.take("alive", 1, 60_000), 20)
    assert (taken.task.task_id, taken.attempt) == ("a", 2)


async def test_a_slow_producer_is_not_robbed_while_redis_is_full(site: Site) -> None:
    await site.admit(*"ab")
    async with Living(site, "slow", "a") as slow:
        with site.admin() as client:
            client.config_set("maxmemory", 1)
            publishing = asyncio.create_task(slow.publish())
            assert await looks_for(site, 2.5 * LEASE_S) == ["b"]
            assert not publishing.done()
            await site.beat()
            await site.trainer.heartbeat(Peer("weights", "weights", "host", 1, True, {}), LEASE_S)
            await site.trainer.lease(PolicyVersion(1, 5), "reader", LEASE_S)
            alive = {peer.name for peer in await site.operator.peers() if peer.alive}
            assert {"trainer", "weights", "slow", "other"} <= alive
            assert await site.operator.leased() == {PolicyVersion(1, 5): ["reader"]}
            client.config_set("maxmemory", 0)
        assert await publishing == "published"
        assert slow.lost in ([], [slow.delivery.entry_id])


@ONE_SERVER
async def test_nobody_is_robbed_after_redis_stood_still(site: Site) -> None:
    await site.admit("a")
    async with Living(site, "alive", "a") as alive:
        with site.admin() as client:
            pid = client.info("server")["process_id"]
        await site.producer("other", LEASE_S)
        os.kill(pid, signal.SIGSTOP)
        await alive.hang()
        await asyncio.sleep(1.5 * LEASE_S)
        os.kill(pid, signal.SIGCONT)
        # The other one is the first to be heard.
        assert await looks_for(site, LEASE_S / 4) == []
        alive.go_on()
        assert await looks_for(site, LEASE_S) == []
        assert alive.lost == []
        assert await alive.publish() == "published"


@ONE_SERVER
async def test_nobody_is_robbed_after_redis_was_away(site: Site) -> None:
    await site.admit("a")
    async with Living(site, "alive", "a") as alive:
        other = await site.producer("other", LEASE_S)
        site.server.kill()
        taking = asyncio.create_task(other.take("other", 1, 500))
        await asyncio.sleep(1.5 * LEASE_S)
        await asyncio.to_thread(site.server.start)
        assert await taking == []
        assert await looks_for(site, LEASE_S) == []
        assert alive.lost == []
        assert await alive.publish() == "published"


async def test_the_dead_are_noticed_also_after_redis_was_away(site: Site) -> None:
    await site.admit("a")
    dead = await site.producer("dead", LEASE_S)
    await dead.take("dead", 1, 0)
    await site.producer("other", LEASE_S)
    await site.restart()
    got: list[str] = []

    async def taken_over() -> bool:
        got.extend(await looks_for(site, 0.1))
        return bool(got)

    await wait_until(taken_over, "the dead producer's task is taken over")
    assert got == ["a"]


async def test_foreign_peers_are_left_out(site: Site) -> None:
    run = await site.producer("p0")
    keys = Keys(site.record.run_id)
    with site.admin() as client:
        foreign = {"a": "", "b": "nonsense", "c": "1 nonsense", "d": "1 []", "e": '1 {"role": 3}', "f": b"1 \xff"}
        foreign["g"] = '1 {"role":"king","host":"h","pid":1,"state":{}}'
        client.hset(keys.of("peers"), mapping=foreign)
        assert [peer.name for peer in await run.peers()] == ["p0"]
        client.hset(keys.of("peers"), mapping={f"p{number}": "1 {}" for number in range(2000)})
        await run.heartbeat(Peer("p0", "producer", "host", 1, True, {}), LEASE_S)
        assert client.hlen(keys.of("peers")) <= 8
