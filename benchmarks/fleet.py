"""Many light producers and one light consumer: every call to the broker that real ones make, and nothing else.

What producers sample is made beforehand, as by the engine `scripted`; what the consumer takes in is judged, batched
into steps and settled at checkpoints, and trained by nobody. Many producers share one process, so that what is
measured is the broker and not the start of interpreters; each has its own name, lease and connections, and its own
loops for taking, renewing, beating, orders and the head of the weights, as `producers/loops.py` has.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection as Pipe
from typing import Any

import uvloop

from benchmarks.message_path import DIGESTS, GROUP_SIZE, VERSIONS, pool
from broker.api import Fence, Hello, Peer
from broker.connect import Run, connect_run
from broker.messages import SCHEMA, Group, GroupDelivery, StepEntry, StepRecord, Task, TaskDelivery
from consumers.ingest import judge
from headrace.policy.memory import keep_freed_memory
from headrace.version import PolicyVersion

LEASE_S = 10.0
"""Renewals and heartbeats come four times as often."""
BLOCK_MS = 1000
HELD = 8
"""Tasks that one producer holds at most."""
CHECKPOINT_EVERY = 10
FAILS_EVERY = 101
"""Of so many groups one fails, with a reason of its own."""
MAX_LIVE_VERSIONS = 3
DEADLINE_MS = 3_600_000
MOST = 32
"""Groups of one read, as consumers/intake.py takes them."""
MANIFEST = bytes(4096)
PUBLISHED_AT = "published_at"
"""When a group left, on the clock that all processes of a machine share: it travels among the group's seconds."""
Loop = Callable[[], Coroutine[Any, Any, None]]


class LightProducer:
    """Takes, waits for `pause_s` as if it decoded, and publishes, until it is told to leave."""

    def __init__(self, url: str, run_id: str, name: str, groups: list[Group], pause_s: float = 0.0) -> None:
        self.name = name
        self._run: Run = connect_run(url, run_id)
        self._groups = itertools.cycle(groups)
        self._pause_s = pause_s
        self._held: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._leaving = asyncio.Event()
        self.published = 0

    def leave(self) -> None:
        self._leaving.set()
        self._changed.set()

    async def serve(self) -> None:
        await self._run.join(Hello(self.name, SCHEMA, DIGESTS, "localhost", 1))
        await self._beat()
        async with asyncio.TaskGroup() as loops:
            for loop in (self._take, self._renew, self._heartbeat, self._orders, self._heads):
                loops.create_task(loop())
        await self._run.retire(self.name)
        await self._run.close()

    async def _take(self) -> None:
        async with asyncio.TaskGroup() as jobs:
            while not self._leaving.is_set():
                self._changed.clear()
                if room := HELD - len(self._held):
                    for delivery in await self._run.take(self.name, room, BLOCK_MS):
                        self._held[delivery.entry_id] = jobs.create_task(self._play(delivery))
                else:
                    await self._changed.wait()

    async def _play(self, delivery: TaskDelivery) -> None:
        if self._pause_s:
            await asyncio.sleep(self._pause_s)
        made = next(self._groups)
        group = replace(
            made,
            task_id=delivery.task.task_id,
            attempt=delivery.attempt,
            producer=self.name,
            seconds={**made.seconds, PUBLISHED_AT: time.monotonic()},
        )
        answer = await self._run.publish(self.name, delivery, group)
        assert answer == "published", f"task {delivery.task.task_id} was {answer}"
        del self._held[delivery.entry_id]
        self.published += 1
        self._changed.set()

    async def _renew(self) -> None:
        while not await self._left():
            if self._held:
                await self._run.renew(self.name, list(self._held))

    async def _heartbeat(self) -> None:
        while not await self._left():
            await self._beat()
            await self._run.now_ms()
            await self._run.state()

    async def _orders(self) -> None:
        while not self._leaving.is_set():
            await self._run.orders("$", BLOCK_MS)

    async def _heads(self) -> None:
        head: PolicyVersion | None = None
        while not self._leaving.is_set():
            head = await self._run.wait_head(head, BLOCK_MS)

    async def _beat(self) -> None:
        figures = {"version": "1.7", "phase": "decode", "tokens_per_s": 250.0, "occupancy": 0.97, "idle": 0.02}
        counts = {"slots": 64, "busy_slots": 63, "waiting": 0, "taken": self.published, "published": self.published}
        seconds = {"decode": time.monotonic(), "prefill": 1.0, "swap": 0.5, "wait_no_task": 0.1}
        state = {**figures, **counts, "seconds": seconds, "metrics_url": "http://127.0.0.1:9000/metrics"}
        await self._run.heartbeat(Peer(self.name, "producer", "localhost", 1, True, state), LEASE_S)

    async def _left(self) -> bool:
        return await _happens(self._leaving, LEASE_S / 4)


@dataclass(slots=True)
class LightConsumer:
    """Keeps a window of tasks open, makes steps of whole groups, settles them at checkpoints."""

    run: Run
    fence: Fence
    window: int
    groups_per_step: int
    step: int = 0
    number: int = 0
    """Of the next task."""
    waits_s: list[float] = field(default_factory=list)
    """From publish to receipt, of each group of a round that asked for it."""
    _received: int = 0
    _ready: list[GroupDelivery] = field(default_factory=list)
    _unsettled: list[StepEntry] = field(default_factory=list)

    async def begin(self) -> None:
        """The versions that the groups name are there before them."""
        while self.step < VERSIONS[-1].step:
            self.step += 1
            await self.publish_head()

    async def play(self, count: int, one_by_one: bool = False) -> None:
        """Admit, take in and settle so many groups; with `one_by_one` only one is ever under way."""
        self.waits_s.clear()
        until = self.number + count
        await self._admit(min(count, 1 if one_by_one else self.window))
        while count:
            deliveries = await self.run.take_groups(self.fence, MOST, BLOCK_MS)
            now = time.monotonic()
            count -= len(deliveries)
            for delivery in deliveries:
                if one_by_one:
                    self.waits_s.append(now - delivery.group.seconds[PUBLISHED_AT])
                await self._receive(delivery)
            if one_by_one and deliveries:
                await self._admit(min(1, until - self.number))
            while len(self._ready) >= self.groups_per_step:
                await self._make_step()
                if not one_by_one:
                    await self._admit(min(self.groups_per_step, until - self.number))
        if self._ready:
            await self._make_step()
        await self._settle()

    async def publish_head(self) -> None:
        version = PolicyVersion(self.fence.incarnation, self.step)
        await self.run.publish_head(self.fence, version, MANIFEST)
        if self.step >= MAX_LIVE_VERSIONS:
            await self.run.forget(PolicyVersion(self.fence.incarnation, self.step - MAX_LIVE_VERSIONS))

    async def beat(self, over: asyncio.Event) -> None:
        while not await _happens(over, LEASE_S / 4):
            state = {"step": self.step, "phase": "train"}
            await self.run.heartbeat(Peer("trainer", "trainer", "localhost", 1, True, state), LEASE_S)

    async def _receive(self, delivery: GroupDelivery) -> None:
        judged = judge(delivery.group)
        self._received += 1
        if judged is None and self._received % FAILS_EVERY:
            self._ready.append(delivery)
            return
        verdict, reason = judged or ("failed", f"the verifier of {delivery.group.task_id} broke")
        await self.run.settle(self.fence, [StepEntry(delivery.entry_id, delivery.group.task_id, verdict, reason)])

    async def _make_step(self) -> None:
        batch, self._ready = self._ready[: self.groups_per_step], self._ready[self.groups_per_step :]
        trained = [StepEntry(one.entry_id, one.group.task_id, "trained") for one in batch]
        self.step += 1
        version = PolicyVersion(self.fence.incarnation, self.step)
        await self.run.append_step(self.fence, StepRecord(version, tuple(trained)))
        await self.publish_head()
        await self.run.set_step(self.fence, self.step)
        await self.run.peers()
        self._unsettled += trained
        if self.step % CHECKPOINT_EVERY == 0:
            await self._settle()

    async def _settle(self) -> None:
        settled, self._unsettled = self._unsettled, []
        if settled:
            await self.run.settle(self.fence, settled)

    async def _admit(self, count: int) -> None:
        if count < 1:
            return
        await self.run.balance()
        deadline_ms = await self.run.now_ms() + DEADLINE_MS
        newest = PolicyVersion(self.fence.incarnation, self.step)
        numbers = range(self.number, self.number + count)
        # Ids of one length: what is kept of the last tasks is no larger than what is kept of the first.
        tasks = [Task(f"t{n:09}", "train", "random", n, n, GROUP_SIZE, newest, deadline_ms, self.step) for n in numbers]
        self.number += count
        await self.run.admit(self.fence, tasks, self.number)


def fleet_process(pipe: Pipe, url: str, run_id: str, tokens: int) -> None:
    """Told (number, pause_s) it has so many producers from then on, all of them new ones; ends when told None."""

    async def serve() -> None:
        keep_freed_memory()
        groups, numbers = pool(tokens), itertools.count()
        pipe.send(None)
        while (job := await asyncio.to_thread(pipe.recv)) is not None:
            count, pause_s = job
            fleet = [LightProducer(url, run_id, f"producer-{next(numbers)}", groups, pause_s) for _ in range(count)]
            async with serving(fleet):
                pipe.send(None)
                # Until it is told to leave.
                await asyncio.to_thread(pipe.recv)
            pipe.send(sum(one.published for one in fleet))

    uvloop.run(serve())


def consumer_process(pipe: Pipe, url: str, run_id: str, window: int, groups_per_step: int) -> None:
    """For each (count, one_by_one) one round, answered with seconds from publish to receipt; ends when told None."""

    async def serve() -> None:
        keep_freed_memory()
        run = connect_run(url, run_id)
        consumer = LightConsumer(run, await run.take_fence(0), window, groups_per_step)
        await consumer.begin()
        over = asyncio.Event()
        async with asyncio.TaskGroup() as loops:
            loops.create_task(consumer.beat(over))
            pipe.send(None)
            while (job := await asyncio.to_thread(pipe.recv)) is not None:
                await consumer.play(*job)
                pipe.send(list(consumer.waits_s))
            over.set()
        await run.close()

    uvloop.run(serve())


@contextlib.asynccontextmanager
async def serving(fleet: list[LightProducer]) -> AsyncIterator[None]:
    """All of them serve within; raises what broke one of them."""
    async with asyncio.TaskGroup() as group:
        for producer in fleet:
            group.create_task(producer.serve())
        try:
            yield
        finally:
            for producer in fleet:
                producer.leave()


async def _happens(event: asyncio.Event, seconds: float) -> bool:
    """Whether it is set within these seconds."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()
