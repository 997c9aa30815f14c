"""The follower: what a rank beside rank 0 does. It does what rank 0 orders, and says how it is.

Wait graph. `follow` waits for: the next order, however long that takes, and the worker thread that does it; rank 0
wakes it. A rank that has failed ends that wait (`alarm.py`). `beat` waits for a quarter of a lease. SIGTERM changes
nothing: rank 0 is told so as well, finishes its step, and orders the end.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from broker.api import Fence, Peer
from broker.connect import Run
from consumers.lanes import rank_lane
from consumers.lines import Lines
from consumers.parts import Model, load
from consumers.ranks.alarm import PERIOD_S
from consumers.ranks.group import PublishingRanks, Ranks, reason_of
from consumers.ranks.orders import Begin, End, Order, Publish
from consumers.waiting import wait_for
from consumers.worker import Worker
from headrace.config import Config
from headrace.errors import ServiceError
from headrace.hosts import host_name
from headrace.invocation import Invocation
from headrace.service import Service
from headrace.telemetry import clock
from headrace.telemetry.endpoint import Endpoint
from headrace.telemetry.metrics import Metrics
from headrace.telemetry.phases import Lane
from headrace.telemetry.recorder import Recorder
from headrace.version import PolicyVersion
from weightsync.arena import Arena
from weightsync.publisher import Publisher

LEASE_S = 10.0
WAITS = "wait_order"
"""The phase between two orders."""


async def follow(service: Service, told: Invocation, config: Config, port: Run, ranks: Ranks) -> None:
    """Load what rank 0 names, and add the loops. Raises HeadraceError when that cannot be."""
    name = f"trainer-{ranks.rank}"
    lane, metrics, worker = rank_lane(config), Metrics(told.run_id, name), Worker(name, ranks.explaining)
    begin = await worker(ranks.hear)
    if not isinstance(begin, Begin):
        raise ServiceError(f"rank 0 ordered {type(begin).__name__} before the beginning")
    record = await port.record()
    lines = Lines(Path(record.folder) / f"{name}.jsonl", begin.incarnation)
    recorder = Recorder(lines.journal.write, [lane])
    metrics.watch(lane)
    recorder.start()
    try:
        newest = Path(begin.checkpoint) if begin.checkpoint else None
        model = await worker(lambda: load(record, newest, lane, ranks))
        recorder.add(lane, await worker(model.trainer.roofline))
        publisher = Publisher(
            port,
            # Only rank 0 moves the head.
            Fence(begin.incarnation, ""),
            model.layout,
            told.run_id,
            config.weights.max_live_versions,
            arena=Arena(run_folder=record.folder),
            ranks=PublishingRanks(ranks),
        )
        follower = Follower(name, port, ranks, model, publisher, worker, lane, lines, service)
        endpoint = Endpoint(metrics, follower.health, told.metrics_token)
        follower.metrics_url = await endpoint.start(told.metrics_host or config.telemetry.host, 0)
    except BaseException:
        recorder.close()
        raise

    async def follows() -> None:
        try:
            await follower.run()
            await asyncio.to_thread(ranks.end)
        except BaseException as error:
            await asyncio.to_thread(ranks.fail, reason_of(error))
            raise
        finally:
            recorder.close()
            lines.close()
            await endpoint.close()
            await port.close()

    service.add(name, follows)


@dataclass(slots=True)
class Follower:
    name: str
    port: Run
    ranks: Ranks
    model: Model
    publisher: Publisher
    worker: Worker
    lane: Lane
    lines: Lines
    service: Service
    metrics_url: str = ""
    version: str = ""
    """The newest that this rank published."""
    over: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Until rank 0 says that it is the end; raises what ended it otherwise."""
        try:
            async with asyncio.TaskGroup() as group:
                for loop in (self.follow, self.beat, self.heed):
                    group.create_task(self._ending_all(loop), name=loop.__name__)
        finally:
            await self.publisher.close()
            await self.worker.close()
        await self.port.retire(self.name)
        self.service.stop("rank 0 has ended")

    def health(self) -> dict[str, Any]:
        """What `/healthz` shows."""
        return {"ok": not self.ranks.failure, "service": self.name, **self._state()}

    async def follow(self) -> None:
        """Does what rank 0 orders, one after the other."""
        while True:
            self.lane.enter(WAITS)
            order = await self.worker(self.ranks.hear)
            self.lane.enter("bookkeeping")
            if isinstance(order, End):
                # Rank 0 waits no longer for a broker that is away.
                self.port.hasten()
                return
            await self._do(order)

    async def beat(self) -> None:
        """Tells the broker that this rank lives."""
        while not self.over.is_set():
            self.publisher.check_head()
            peer = Peer(self.name, "rank", host_name(), os.getpid(), True, self._state())
            await self.port.heartbeat(peer, LEASE_S)
            self.lines.write("clock", **await clock.offset(self.port.now_ms))
            await wait_for(self.over, LEASE_S / 4)

    async def heed(self) -> None:
        """Ends all once another rank cannot go on."""
        while not self.over.is_set():
            if self.ranks.failure:
                raise ServiceError(self.ranks.failure)
            await wait_for(self.over, PERIOD_S)

    async def _ending_all(self, loop: Callable[[], Awaitable[None]]) -> None:
        try:
            await loop()
        finally:
            self.over.set()

    async def _do(self, order: Order) -> None:
        trainer = self.model.trainer
        if not isinstance(order, Publish):
            await self.worker(lambda: trainer.follow(order))
            return
        with self.lane.during("weight_publish"):
            version = PolicyVersion(*order.version)
            await self.publisher.publish(version, trainer.rows())
            self.version = str(version)

    def _state(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "phase": self.lane.phase,
            "troubles": [],
            "event_loop_lag_s": round(self.service.event_loop_lag_s, 4),
            "metrics_url": self.metrics_url,
            "seconds": {phase: round(spent, 3) for phase, spent in self.lane.seconds().items()},
        }
