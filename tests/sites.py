"""A Redis that tests break, with the services of one run on it: a trainer and producers, each with its connection."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from dataclasses import dataclass, field

import redis

from broker.api import Balance, Fence, Peer, RunRecord, Runs
from broker.connect import Run, connect_run, connect_runs
from broker.keys import Keys
from broker.messages import GroupDelivery, StepEntry, TaskDelivery, Verdict
from headrace.config import BrokerConfig
from tests.reigns import reign
from tests.servers import RedisProcess
from tests.support import make_group, make_task, wait_until

CONFIG = BrokerConfig(stream_block_ms=200, connect_timeout_s=20.0, outage_s=60.0, max_deliveries=9)
LEASE_S = 30.0
PATIENT = ("--appendfsync", "always", "--auto-aof-rewrite-percentage", "0")
"""Each command is in the file before its answer comes, so that a test knows where to cut."""


@dataclass
class Site:
    server: RedisProcess
    record: RunRecord
    config: BrokerConfig = CONFIG
    tasks: list[str] = field(default_factory=list)
    held: dict[str, GroupDelivery] = field(default_factory=dict)
    """Task id to group: what the trainer has and has not settled."""
    verdicts: Counter[str] = field(default_factory=Counter)
    """Those that the trainer gave."""
    trained: list[str] = field(default_factory=list)
    runs: Runs = field(init=False)
    trainer: Run = field(init=False)
    operator: Run = field(init=False)
    producers: dict[str, Run] = field(default_factory=dict)
    in_play: dict[str, dict[str, TaskDelivery]] = field(default_factory=dict)
    dead: set[str] = field(default_factory=set)
    fence: Fence = field(init=False)
    _connected: list[Run] = field(default_factory=list)

    async def begin(self) -> Site:
        self.runs = connect_runs(self.server.url, self.config)
        await self.runs.create(self.record)
        self.trainer, self.operator = self.connect(), self.connect()
        self.fence = await reign(self.trainer)
        await self.operator.record()
        return self

    def connect(self, config: BrokerConfig | None = None) -> Run:
        self._connected.append(connect_run(self.server.url, self.record.run_id, config or self.config))
        return self._connected[-1]

    async def producer(self, name: str = "p0", lease_s: float = LEASE_S) -> Run:
        self.dead.discard(name)
        if name not in self.producers:
            self.producers[name] = self.connect()
            await self.producers[name].record()
        await self.producers[name].heartbeat(Peer(name, "producer", "host", 1, True, {}), lease_s)
        return self.producers[name]

    async def die(self, name: str) -> None:
        """A producer is no more, as if its lease had run out."""
        if self.producers.pop(name, None) is not None:
            self.in_play.pop(name, None)
            self.dead.add(name)
            await self.operator.retire(name)

    async def close(self) -> None:
        for run in self._connected:
            await run.close()
        await self.runs.close()

    def admin(self) -> redis.Redis:
        return redis.Redis.from_url(self.server.admin_url)

    # -- what services do

    async def beat(self) -> None:
        """The trainer looks after its run, as it does every quarter of a lease."""
        await self.trainer.heartbeat(Peer("trainer", "trainer", "host", 1, True, {}), LEASE_S)

    async def admit(self, *names: str) -> None:
        self.tasks += names
        await self.trainer.admit(self.fence, [make_task(name) for name in names], cursor=len(self.tasks))

    async def take(self, count: int, name: str = "p0") -> list[TaskDelivery]:
        """Take tasks, to be played later."""
        producer = await self.producer(name)
        taken = await producer.take(name, count, 0)
        self.in_play.setdefault(name, {}).update((delivery.entry_id, delivery) for delivery in taken)
        return taken

    async def play(self, count: int, name: str = "p0") -> list[str]:
        """Take tasks, and publish the groups of all that were taken and are still this producer's."""
        await self.take(count, name)
        producer, taken = self.producers[name], self.in_play.pop(name)
        lost = await producer.renew(name, list(taken))
        published = []
        for delivery in taken.values():
            group = make_group(delivery.task, delivery.attempt, name)
            known = self.attempt(delivery.entry_id) == delivery.attempt
            answer = await producer.publish(name, delivery, group)
            # Where Redis lost that it delivered the task once more, it is played once more.
            assert (answer == "published") == (known and delivery.entry_id not in lost)
            if answer == "published":
                published.append(delivery.task.task_id)
        return published

    def attempt(self, entry_id: str) -> int | None:
        """Of a task's entry, as Redis counts; None where nobody has it."""
        tasks = Keys(self.record.run_id).of("tasks")
        with self.admin() as client:
            entry = client.xrange(tasks, entry_id, entry_id)
            pending = client.xpending_range(tasks, "producers", entry_id, entry_id, 1) if entry else []
        return int(entry[0][1][b"attempt"]) + pending[0]["times_delivered"] if pending else None

    async def receive(self, count: int) -> list[str]:
        """Take groups; what the broker closed itself is not held."""
        taken = await self.trainer.take_groups(self.fence, count, 0)
        for delivery in taken:
            assert delivery.group.task_id not in self.held, "a task has one group"
            if delivery.group.outcome == "played":
                self.held[delivery.group.task_id] = delivery
        return [delivery.group.task_id for delivery in taken]

    async def settle(self, *names: str, verdict: Verdict = "trained") -> None:
        entries = [StepEntry(self.held.pop(name).entry_id, name, verdict) for name in names]
        self.verdicts[verdict] += len(entries)
        if verdict == "trained":
            self.trained += names
        await self.trainer.settle(self.fence, entries)

    async def finish(self) -> Balance:
        """Play until nothing is outstanding, and everything that was admitted has a verdict."""

        async def nothing_left() -> bool:
            await self.beat()
            for name in self.dead:
                # Redis may have forgotten that it died.
                await self.operator.retire(name)
            for name in {"p0", *self.producers}:
                await self.play(8, name)
            await self.receive(8)
            await self.settle(*self.held)
            sheet = await self.sheet()
            return sheet.outstanding == 0

        await wait_until(nothing_left, "all tasks have a verdict")
        assert len(set(self.trained)) == len(self.trained), "nothing is trained twice"
        sheet = await self.sheet()
        for verdict, number in self.verdicts.items():
            assert sheet.verdicts.get(verdict, 0) == number, (verdict, sheet)
        return sheet

    async def sheet(self) -> Balance:
        (balance,) = await self.trainer.balance()
        assert balance.closed, balance
        return balance

    # -- what happens to Redis

    def size(self) -> int:
        """Of the append-only file: a place where it may be cut."""
        return self.server.append_only_file.stat().st_size

    async def restart(self, cut_at: int | None = None) -> None:
        """Kill it, cut its append-only file, and start it again."""
        self.server.kill()
        if cut_at is not None:
            os.truncate(self.server.append_only_file, cut_at)
        await asyncio.to_thread(self.server.start)

    def empty(self) -> None:
        with self.admin() as client:
            client.flushall()
