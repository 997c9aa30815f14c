"""What the tests of whole producers share: the other side of one, and a run with what is started in it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from broker.api import Fence, RunRecord
from broker.connect import Run, connect_run, connect_runs
from broker.messages import SCHEMA, GroupDelivery, Task
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
        assert producer.jobs.held == {}

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


Setting = Callable[..., Awaitable[Scene]]
"""Makes the scene of a test: a run of this environment with these options of the scripted engine."""


@asynccontextmanager
async def settings(redis_url: str, run_id: str) -> AsyncIterator[Setting]:
    """Runs on this Redis, or on the one whose `url` is given; they are deleted afterwards."""
    made: list[Scene] = []

    async def make(
        environment: str = "arithmetic",
        url: str = redis_url,
        folder: str = "",
        change: dict[str, Any] | None = None,
        **engine: Any,
    ) -> Scene:
        tree = config(environment, change or {}, **engine).model_dump(mode="json")
        record = RunRecord(run_id, SCHEMA, tree, {"model": "a" * 32}, vocab_size=256, folder=folder)
        runs = connect_runs(url, BROKER)
        await runs.create(record)
        await runs.close()
        port = connect_run(url, run_id, BROKER)
        fence = await port.take_fence(0)
        publisher = Publisher(port, fence, LAYOUT, run_id, 3)
        made.append(Scene(url, record, Trainer(port, fence, publisher, environment)))
        return made[-1]

    yield make
    for scene in made:
        await scene.trainer.publisher.close()
        await scene.trainer.port.close()
        runs = connect_runs(scene.url, BROKER)
        await runs.delete(scene.record.run_id)
        await runs.close()


async def counted(producer: Producer, name: str, **labels: str) -> float:
    """What /metrics says; 0 where it says nothing."""
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    lines = [line for line in (await metrics(producer)).splitlines() if line.startswith(f"headrace_{name}{{")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if all(label in line for label in wanted))


async def metrics(producer: Producer) -> str:
    return await page(producer.metrics_url)


async def page(url: str) -> str:
    def fetch() -> str:
        with urllib.request.urlopen(url) as opened:
            return str(opened.read().decode())

    return await asyncio.to_thread(fetch)


def config(environment: str, change: dict[str, Any], **engine: Any) -> Config:
    """`change` replaces keys of single sections, and whole lists."""
    tree: dict[str, Any] = {
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
    for section, keys in change.items():
        tree[section] = {**tree.get(section, {}), **keys} if isinstance(keys, dict) else keys
    return Config.model_validate(tree)
