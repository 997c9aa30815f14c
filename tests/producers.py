"""What the tests of whole producers share: the other side of one, and a run with what is started in it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from broker.api import Fence, RunRecord
from broker.connect import Run
from broker.messages import GroupDelivery, Task
from headrace.config import BrokerConfig, Config
from headrace.invocation import Invocation
from headrace.service import Service
from headrace.version import PolicyVersion
from producers.loops import Producer
from producers.start import start
from tests.support import FAR_FUTURE_MS, wait_until
from weightsync.manifest import Layout
from weightsync.publisher import Publisher

torch.set_num_threads(1)

BROKER = BrokerConfig(stream_block_ms=200, connect_timeout_s=5.0)
LAYOUT = Layout.of([("weight", "float32", (4, 4))])
LEASE_S = 2.0


@dataclass
class Trainer:
    """The other side of a producer: admits tasks, takes groups, publishes versions."""

    port: Run
    fence: Fence
    publisher: Publisher
    environment: str
    groups: dict[str, GroupDelivery] = field(default_factory=dict)

    async def publish(self, step: int) -> None:
        assert await self.publisher.publish(self.version(step), {"weight": torch.full((4, 4), float(step))})

    def version(self, step: int) -> PolicyVersion:
        return PolicyVersion(self.fence.incarnation, step)

    async def admit(self, *names: str, step: int = 0, **fields: Any) -> None:
        await self.port.admit(self.fence, [replace(self.task(name, step), **fields) for name in names])

    def task(self, name: str, step: int = 0) -> Task:
        index = int(name.partition("-")[2] or 0)
        return Task(name, "train", self.environment, index, 7, 4, self.version(step), FAR_FUTURE_MS)

    async def receive(self, *names: str) -> None:
        """Take groups until all of these tasks have one."""

        async def arrived() -> bool:
            for delivery in await self.port.take_groups(self.fence, 64, 100):
                assert delivery.group.task_id not in self.groups
                self.groups[delivery.group.task_id] = delivery
            return set(names) <= self.groups.keys()

        await wait_until(arrived, f"groups of {', '.join(names)} have come", seconds=60)


@dataclass
class Scene:
    """One run and what tests start in it."""

    url: str
    record: RunRecord
    trainer: Trainer

    @asynccontextmanager
    async def producer(self, name: str = "p1") -> AsyncIterator[Producer]:
        """A producer in this process, which must end cleanly by the end of the block at the latest."""
        service = Service(name)
        producer = await start(service, Invocation(self.url, self.record.run_id, name))
        running = asyncio.create_task(service.run())
        try:
            yield producer
        finally:
            service.stop("the test is over")
            await asyncio.wait_for(running, 60)
        assert producer.held == {}

    def process(self, name: str, **environ: str) -> subprocess.Popen[str]:
        told = {"HEADRACE_REDIS_URL": self.url, "HEADRACE_RUN": self.record.run_id, "HEADRACE_NAME": name, **environ}
        return subprocess.Popen(
            [sys.executable, "-m", "producers"], env={**os.environ, **told}, stderr=subprocess.PIPE, text=True
        )

    async def peer(self, name: str) -> dict[str, Any]:
        peers = {peer.name: peer for peer in await self.trainer.port.peers()}
        return peers[name].state if name in peers and peers[name].alive else {}

    async def held(self) -> int:
        return (await self.trainer.port.depths()).tasks_held


def config(environment: str, **engine: Any) -> Config:
    return Config.model_validate(
        {
            "environments": [{"name": environment}],
            "model": {"context_length": 128},
            "sampling": {"max_new_tokens": 32},
            "trainer": {"group_size": 4},
            "producer": {
                "engine": "scripted",
                "engine_options": {"length_mean": 8.0, **engine},
                "slots": 8,
                "lease_s": LEASE_S,
                "drain_s": 20.0,
                "reward_deadline_s": 1.0,
            },
            "broker": BROKER.model_dump(),
        }
    )
