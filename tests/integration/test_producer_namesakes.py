"""Two tasks of one name at one producer: both are played, and the broker says which of them counts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import redis.asyncio as aioredis

from broker.codec import encode_task
from broker.keys import Keys
from broker.messages import StepEntry
from producers.loops import Producer
from tests.producers import Scene, settings
from tests.support import wait_until


@pytest.fixture
async def scene(redis_url: str, run_id: str, no_key_left: None) -> AsyncIterator[Scene]:
    async with settings(redis_url, run_id) as make:
        yield await make(step_s=0.05, length_mean=1000.0, length_sigma=0.0)


async def held(producer: Producer, *indices: int) -> None:
    def all_are() -> bool:
        return {held.delivery.task.index for held in producer.jobs.held.values()} == set(indices)

    await wait_until(all_are, f"tasks of the indices {indices} are held")


async def nothing_left(scene: Scene, producer: Producer) -> None:
    await wait_until(lambda: producer.jobs.held == {}, "nothing is held any more")
    await wait_until(lambda: producer.port._holding == {}, "nor is it at the port")  # type: ignore[attr-defined]
    async with aioredis.Redis.from_url(scene.url) as client:
        assert await client.xlen(Keys(scene.record.run_id).of("tasks")) == 0


async def test_a_task_that_comes_after_its_namesake_was_settled(scene: Scene) -> None:
    trainer = scene.trainer
    await trainer.publish(0)
    async with scene.producer() as producer:
        await trainer.admit("task-1")
        await held(producer, 1)
        await trainer.port.settle(trainer.fence, [StepEntry("", "task-1", "failed", "too late")])
        await trainer.admit("task-1", index=2)
        await trainer.receive("task-1")
        assert trainer.groups["task-1"].group.index == 2
        await nothing_left(scene, producer)


async def test_a_foreign_namesake_takes_nothing_from_the_task(scene: Scene) -> None:
    trainer = scene.trainer
    await trainer.publish(0)
    async with scene.producer() as producer, aioredis.Redis.from_url(scene.url) as client:
        await trainer.admit("task-1")
        await held(producer, 1)
        body = encode_task(replace(trainer.task("task-1", 0), index=2))
        fields = {"task": "task-1", "attempt": 0, "kind": "train", "body": body}
        await client.xadd(Keys(scene.record.run_id).of("tasks"), fields)  # type: ignore[arg-type]
        await held(producer, 1, 2)
        await trainer.receive("task-1")
        assert trainer.groups["task-1"].group.index == 1
        await nothing_left(scene, producer)
