"""The loops of a producer: tasks in, scored groups out.

Wait graph, one line per loop: what it consumes, what it waits for, who wakes it.

    weights    the head of the run's versions   a newer head; the trainer's publish, else its own block time
    take       stream `tasks`                   the first version (weights, by `changed`); then room: a rollout that was
                                                decoded or a group that was published (a job, by `changed`); then a
                                                task (the trainer's admission, else its own block time)
    job        one task, one per held task      a version as new as the task asks for (weights, by `committed`); the
                                                scores of its environment where they are behind (a job, by `let_in`, at
                                                most `producer.reward_deadline_s` where others go on); its completions
                                                (the engine); its scores (the reward processes, at most their
                                                deadline); the broker's answer to its publish
    renew      the ids that jobs hold           a quarter of the lease
    heartbeat  the engine's counters            a quarter of the lease
    share      the device, where others use it  tokens that are asked for (a job), its turn, others that want it
    in_line    the line for that device         a move of the line, a quarter of the lease
    orders     stream `orders`                  an order; the operator or the trainer, else its own block time
    close      the end of `take`                `take`, which ends after `stopping` once no job is left or time is over;
                                                then the other loops, before the broker's connection is closed

Nobody waits for `renew`, `heartbeat` or `orders`. Jobs (`producers/jobs.py`) wait for slots of the engine and reward
processes, which go on without them, and for other jobs only before they begin (`producers/backlog.py`). Every job ends
within its task's deadline, so no cycle can hold. While the broker is away, each call to it waits, for `broker.outage_s`
at most: jobs play on and hold their groups, of which there are at most `Capacity.most_held`. Once `stopping` is set the
broker is waited for only briefly.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from broker.api import Order, Peer, ProducerPort
from broker.messages import TaskDelivery
from headrace.config import Config
from headrace.errors import BrokerError, BrokerUnavailable, Refused
from headrace.service import Service
from headrace.telemetry import clock
from headrace.version import PolicyVersion
from producers.gauges import Gauges
from producers.jobs import Jobs
from producers.turns import Turns

log = logging.getLogger(__name__)

LOOK_AROUND_S = 0.5
"""A loop that waits inside this process looks at `stopping` so often."""
GOODBYE_S = 5.0
"""What telling the broker of the end may take."""
HASTY_S = 2.0
"""A run that ended needs no more groups: only what is about to be published goes out."""


class Weights(Protocol):
    """Keeps the engine on the newest version; `weightsync.receiver.Receiver` does."""

    async def run(self, stopping: asyncio.Event) -> None: ...


@dataclass(slots=True)
class Producer:
    """The loops of one producer, and what they share."""

    name: str
    service: Service
    port: ProducerPort
    jobs: Jobs
    config: Config
    weights: Weights
    peer: Peer
    gauges: Gauges
    on_close: Callable[[], Awaitable[None]]
    """Ends engine, reward processes and whatever else was started."""
    metrics_url: str = ""
    turns: Turns | None = None
    """On a device that it shares."""
    on_leave: Callable[[], None] = lambda: None
    """Called when it begins to leave."""
    _drain_s: float = 0.0
    _finished: asyncio.Event = field(default_factory=asyncio.Event)
    _beating: asyncio.Lock = field(default_factory=asyncio.Lock)
    _running: set[str] = field(default_factory=set)
    """Loops that may still use the broker; `_alone` is set when none is left."""
    _alone: asyncio.Event = field(default_factory=asyncio.Event)
    _clock_ms: float = 0.0
    """The broker's clock minus this event loop's."""

    def __post_init__(self) -> None:
        self._drain_s = self.config.producer.drain_s
        if self.turns is not None:
            self.turns.on_wait = self.jobs.on_wait_for_device

    @property
    def version(self) -> PolicyVersion | None:
        return self.jobs.version

    @property
    def last_calls_s(self) -> float:
        """What a last call to the broker may take once this producer leaves."""
        return self.config.broker.stream_block_ms / 1000 + self.config.broker.connect_timeout_s

    def add_loops(self) -> None:
        """Register all loops with the service, which must drain longer than this producer does."""
        self.service.drain_s = self.config.producer.drain_s + 2 * self.last_calls_s + 3 * GOODBYE_S
        loops = [self.receive_weights, self.take, self.renew, self.heartbeat, self.orders]
        for loop in loops + ([self.share, self.in_line] if self.turns else []):
            self._running.add(loop.__name__)
            self.service.add(loop.__name__, partial(self._until_end, loop))
        self.service.add("close", self.close)
        self.port.watch(self.jobs.on_outage)

    def health(self) -> dict[str, Any]:
        """What /healthz shows."""
        shown = {"phase": self.jobs.phase(), "version": str(self.version or ""), "held": len(self.jobs.held)}
        return {**shown, "outage": self.jobs.outage} if self.jobs.outage else shown

    async def receive_weights(self) -> None:
        """Follows the head until the service stops; jobs in play finish on the version that is there."""
        with self._unless_leaving():
            await self.weights.run(self.service.stopping)

    async def take(self) -> None:
        """Takes tasks while there is room, and starts a job for each; ends when stopping, after the drain."""
        try:
            with self._unless_leaving():
                await self._read_clock()
            async with asyncio.TaskGroup() as jobs:
                while not self.service.stopping.is_set():
                    self.jobs.changed.clear()
                    self.gauges.does(self.jobs.phase())
                    count = self.jobs.room()
                    if not count:
                        await _within(LOOK_AROUND_S, self.jobs.changed.wait())
                        continue
                    with self._unless_leaving():
                        for delivery in await self._take(count):
                            self._begin(delivery, jobs)
                self.gauges.does("drain")
                await self.jobs.drain(self._drain_s)
        finally:
            self._finished.set()

    async def renew(self) -> None:
        """Keeps the leases of all held tasks, and hears which were lost."""
        while not await self._ended(self.config.producer.lease_s / 4):
            if self.jobs.held:
                with self._unless_leaving():
                    self.jobs.lose(await self.port.renew(self.name, self.jobs.entry_ids))

    async def heartbeat(self) -> None:
        """Says that this producer lives and how it does; stops with the run."""
        lease_s = self.config.producer.lease_s
        while True:
            # Between a head and the next, rollouts begin that may be out of reach already.
            self.jobs.stop_stragglers()
            with self._unless_leaving():
                await self._beat()
            if await self._ended(lease_s / 4):
                return

    async def orders(self) -> None:
        """Obeys the operator and the trainer."""
        after, block_ms = "$", self.config.broker.stream_block_ms
        while not self.service.stopping.is_set():
            with self._unless_leaving():
                for order in await self.port.orders(after, block_ms):
                    after = order.order_id
                    self._obey(order)

    async def share(self) -> None:
        """Takes turns on the device that others use, too, until no job is left."""
        with self._unless_leaving():
            if self.turns is not None:
                await self.turns.run(self._finished)

    async def in_line(self) -> None:
        """Keeps the place in the line for that device."""
        with self._unless_leaving():
            if self.turns is not None:
                await self.turns.device.follow(self._finished)

    async def close(self) -> None:
        """Waits for the end, whatever brings it, and leaves nothing behind."""
        try:
            await self.service.stopping.wait()
            self.port.hasten()
            self.on_leave()
            await self._finished.wait()
        finally:
            await _whole(self._leave())

    async def _take(self, count: int) -> list[TaskDelivery]:
        deliveries = await self.port.take(self.name, count, self.config.broker.stream_block_ms)
        self.gauges.took(len(deliveries))
        return deliveries

    def _begin(self, delivery: TaskDelivery, jobs: asyncio.TaskGroup) -> None:
        held = self.jobs.hold(delivery, self._budget_s(delivery))
        if held is not None:
            held.job = jobs.create_task(self.jobs.play(held), name=f"task {delivery.task.task_id}")

    async def _until_end(self, loop: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await loop()
        finally:
            self._running.discard(loop.__name__)
            if not self._running:
                self._alone.set()

    async def _leave(self) -> None:
        await self._say_goodbye()
        # What still waits for the broker must not find its connection closed: it would open another one.
        if not await _within(self.last_calls_s + GOODBYE_S, self._alone.wait()):
            log.warning("%s closes before these loops have ended: %s", self.name, ", ".join(sorted(self._running)))
        # A call that is given up with the connection, the last to be closed, says that its outage is over.
        self.port.watch(lambda why: None)
        await self.on_close()

    async def _say_goodbye(self) -> None:
        """Give back what is still held, and leave. A broker that is away finds out by the lease."""
        held = self.jobs.held
        try:
            async with asyncio.timeout(GOODBYE_S):
                if held:
                    await self.port.give_back(self.name, self.jobs.entry_ids)
                    self.gauges.event("gave_back", tasks=[task.delivery.task.task_id for task in held.values()])
                async with self._beating:
                    await self.port.retire(self.name)
        except (BrokerError, TimeoutError) as error:
            log.warning("%s leaves without a goodbye: %s", self.name, error or "the broker does not answer")
        self.jobs.forget()

    async def _beat(self) -> None:
        async with self._beating:
            if self._finished.is_set():
                return
            self.jobs.tell_backlog()
            state = self.gauges.heartbeat(self.service.event_loop_lag_s, self.metrics_url)
            await self.port.heartbeat(replace(self.peer, state=state), self.config.producer.lease_s)
        await self._read_clock()
        run = await self.port.state()
        if run.status != "running":
            self._stop(f"the run is {run.status}", hasty=True)

    async def _read_clock(self) -> None:
        loop = asyncio.get_running_loop()
        offset = await clock.offset(self.port.now_ms)
        self._clock_ms = (offset["offset_s"] + clock.now() - loop.time()) * 1000
        self.gauges.event("clock", **offset)

    def _budget_s(self, delivery: TaskDelivery) -> float:
        now_ms = self._clock_ms + asyncio.get_running_loop().time() * 1000
        return max(0.0, (delivery.task.deadline_ms - now_ms) / 1000)

    def _obey(self, order: Order) -> None:
        if order.target not in ("", self.name):
            return
        if order.kind == "drain":
            self._stop("ordered to drain", hasty=False)
        elif order.kind in ("stop", "end"):
            self._stop(order.reason or f"the run was told to {order.kind}", hasty=True)

    def _stop(self, reason: str, *, hasty: bool) -> None:
        if hasty:
            self._drain_s = min(self._drain_s, HASTY_S)
        self.service.stop(reason)

    @contextmanager
    def _unless_leaving(self) -> Iterator[None]:
        """A producer that leaves goes on without a broker that is away, or a run that is gone: errors before that."""
        try:
            yield
        except (BrokerUnavailable, Refused) as error:
            if not self.service.stopping.is_set():
                raise
            log.warning("%s goes on leaving: %s", self.name, error)

    async def _ended(self, seconds: float) -> bool:
        return await _within(seconds, self._finished.wait())


async def _within(seconds: float, wait: Awaitable[object]) -> bool:
    """Whether it came to pass within these seconds."""
    with suppress(TimeoutError):
        # Not asyncio.wait_for, which loses a cancellation that comes together with it (Python 3.11).
        async with asyncio.timeout(seconds):
            await wait
        return True
    return False


async def _whole(work: Coroutine[Any, Any, None]) -> None:
    """Do all of it even when cancelled meanwhile: a loop that failed cancels all others, also while they clean up."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    task.result()
    if cancelled is not None:
        raise cancelled
