"""Trainer and producers at work at once while Redis fails again and again: nothing is lost, nothing counts twice."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest

from broker.api import Peer, RunRecord
from broker.messages import StepEntry, TaskDelivery
from tests.servers import KINDS, RedisProcess
from tests.sites import Site
from tests.support import make_group, make_task, wait_until

LEASE_S = 2.0
WINDOW = 12
FAULTS = 10


class Storm:
    """The loops of a trainer and of producers. Each ends by itself once `over` is set."""

    def __init__(self, site: Site, seed: int) -> None:
        self.site = site
        self.random = random.Random(seed)
        self.over = asyncio.Event()
        self.settled: Counter[str] = Counter()
        """Task id to how often its group was given out and settled."""
        self.told: Counter[str] = Counter()
        """Tasks that the broker closed itself, by what it said."""
        self.admitted = 0
        self.admitting = True

    async def admit(self) -> None:
        site = self.site
        while not self.over.is_set():
            (sheet,) = await site.trainer.balance()
            assert sheet.closed, sheet
            count = min(4, WINDOW - sheet.outstanding)
            if self.admitting and count > 0:
                names = [f"t{self.admitted + number}" for number in range(count)]
                self.admitted += count
                await site.trainer.admit(site.fence, [make_task(name) for name in names], cursor=self.admitted)
            await self._rest()

    async def receive(self) -> None:
        site, waiting = self.site, list[StepEntry]()
        while not self.over.is_set():
            for delivery in await site.trainer.take_groups(site.fence, 4, 50):
                group = delivery.group
                if group.outcome == "played":
                    waiting.append(StepEntry(delivery.entry_id, group.task_id, "trained"))
                else:
                    self.told[group.outcome] += 1
            # What is held for a while is what a Redis may lose meanwhile.
            if len(waiting) > 5 or not self.admitting:
                await site.trainer.settle(site.fence, waiting)
                self.settled.update(entry.task_id for entry in waiting)
                waiting.clear()

    async def beat(self) -> None:
        while not self.over.is_set():
            await self.site.beat()
            await self._rest()

    async def produce(self, name: str) -> None:
        """Takes, plays for a while, publishes; sometimes gives back."""
        port = await self.site.producer(name, LEASE_S)
        held: dict[str, TaskDelivery] = {}

        async def renew() -> None:
            while not self.over.is_set():
                await port.heartbeat(Peer(name, "producer", "host", 1, True, {}), LEASE_S)
                for entry_id in await port.renew(name, list(held)):
                    held.pop(entry_id, None)
                await self._rest()

        async def play(delivery: TaskDelivery) -> None:
            await self._rest()
            if held.pop(delivery.entry_id, None) is None:
                return
            if self.random.random() < 0.1:
                await port.give_back(name, [delivery.entry_id])
                return
            await port.publish(name, delivery, make_group(delivery.task, delivery.attempt, name))

        async with asyncio.TaskGroup() as loops:
            loops.create_task(renew())
            while not self.over.is_set():
                for delivery in await port.take(name, 3, 100):
                    held[delivery.entry_id] = delivery
                    loops.create_task(play(delivery))

    async def fail(self) -> None:
        """Redis fails, each time in another way."""
        faults: list[Callable[[], Awaitable[None]]] = [
            self.restart, self.restart, self.empty, self.cut_connections, self.fill, self.stand_still
        ]  # fmt: skip
        for _ in range(FAULTS):
            before = sum(self.settled.values())
            await wait_until(lambda before=before: sum(self.settled.values()) > before, "work goes on", 60)
            await self.random.choice(faults)()

    async def restart(self) -> None:
        self.site.server.kill()
        file = self.site.server.append_only_file
        cut = self.random.choice((0, 0, 100, 3000, 30_000))
        os.truncate(file, max(0, file.stat().st_size - cut))
        await asyncio.to_thread(self.site.server.start)

    async def empty(self) -> None:
        self.site.empty()

    async def cut_connections(self) -> None:
        with self.site.admin() as client:
            client.client_kill_filter(_type="normal", skipme=True)

    async def fill(self) -> None:
        with self.site.admin() as client:
            client.config_set("maxmemory", 1)
            await asyncio.sleep(0.3)
            client.config_set("maxmemory", 0)

    async def stand_still(self) -> None:
        with self.site.admin() as client:
            pid = client.info("server")["process_id"]
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(0.3)
        os.kill(pid, signal.SIGCONT)

    async def _rest(self) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self.over.wait(), self.random.uniform(0.005, 0.05))


@pytest.mark.parametrize(("redis_kind", "seed"), [*zip(KINDS, range(3), strict=True)], indirect=["redis_kind"])
async def test_nothing_is_lost_in_a_storm(
    redis_process: Callable[..., RedisProcess], record: RunRecord, seed: int
) -> None:
    site = await Site(redis_process("--appendfsync", "always"), record).begin()
    storm = Storm(site, seed)

    async def all_done() -> bool:
        (sheet,) = await site.trainer.balance()
        return len(storm.settled) == storm.admitted and sheet.outstanding == 0

    async with asyncio.TaskGroup() as loops:
        for loop in (storm.admit(), storm.receive(), storm.beat(), storm.produce("p0"), storm.produce("p1")):
            loops.create_task(loop)
        await storm.fail()
        storm.admitting = False
        await wait_until(all_done, "all tasks have a verdict", 60)
        storm.over.set()
    sheet = await site.sheet()
    assert max(storm.settled.values()) == 1, "nothing is trained twice"
    assert sheet.verdicts["trained"] == storm.admitted
    assert sheet.admitted == storm.admitted + sheet.verdicts.get("lost", 0)
    assert storm.told == {}
    await site.close()
