"""The publisher over a real broker: what it makes of tensors, and when it skips, frees or refuses."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from broker.connect import Run
from headrace.errors import Fenced, WeightError
from headrace.service import Service
from headrace.telemetry.metrics import Metrics
from headrace.version import PolicyVersion
from tests.weights import HOST, LAYOUT, Trainer, flat, tensors, training
from weightsync.arena import Arena
from weightsync.publisher import Publisher
from weightsync.service import WeightService


@pytest.fixture
async def trainer(run: Run, run_id: str, tmp_path: Path) -> AsyncIterator[Trainer]:
    async with training(run, run_id, Arena(tmp_path)) as trainer:
        yield trainer


async def test_publish_is_skipped_while_readers_hold_all_segments(trainer: Trainer) -> None:
    port = trainer.port
    assert await trainer.publish(0)
    await port.lease(trainer.version(0), "reader", 60)
    assert await trainer.publish(1)
    assert not await trainer.publish(2)
    assert trainer.publisher.stats().skipped == 1
    assert await port.head() == trainer.version(1)
    await port.release(trainer.version(0), "reader")
    assert await trainer.publish(3)
    assert [name.version.step for name in trainer.arena.segments()] == [3]
    assert [await port.manifest(trainer.version(step)) is None for step in (0, 1, 2, 3)] == [True, True, True, False]


async def test_what_redis_forgot_of_the_newest_version_is_said_again(trainer: Trainer) -> None:
    await trainer.publisher.announce_again()
    assert await trainer.port.head() is None, "there is nothing to say yet"
    assert await trainer.publish(0)
    assert await trainer.publish(1)
    manifest = await trainer.port.manifest(trainer.version(1))
    await trainer.port.forget(trainer.version(1))
    await trainer.publisher.announce_again()
    assert await trainer.port.manifest(trainer.version(1)) == manifest
    assert await trainer.port.head() == trainer.version(1)


async def test_event_loop_lives_while_the_publisher_casts(trainer: Trainer) -> None:
    loop_was_free = threading.Event()

    class Slow:
        """A tensor that can be cast only once something else ran on the event loop."""

        shape = (7,)

        def detach(self) -> torch.Tensor:
            asyncio.run_coroutine_threadsafe(set_free(), loop)
            assert loop_was_free.wait(20), "the event loop stood still while a tensor was cast"
            return torch.zeros(7)

    async def set_free() -> None:
        loop_was_free.set()

    loop = asyncio.get_running_loop()
    values: dict[str, object] = {**tensors(0), "norm": Slow()}
    assert await trainer.publisher.publish(trainer.version(0), values)  # type: ignore[arg-type]


async def test_fenced_trainer_leaves_no_segment(trainer: Trainer) -> None:
    await trainer.port.take_fence(0)
    with pytest.raises(Fenced):
        await trainer.publish(0)
    assert trainer.arena.segments() == []


async def test_head_of_a_dead_trainer_stays_however_old_until_the_next_one_publishes(
    trainer: Trainer, run_id: str
) -> None:
    assert await trainer.publish(7)
    (left,) = trainer.arena.segments()
    dead = replace(left, owner=replace(left.owner, pid=1))
    file = (trainer.arena.folder / str(left)).rename(trainer.arena.folder / str(dead))
    os.utime(file, (0, 0))
    fence = await trainer.port.take_fence(0)
    publisher = Publisher(trainer.port, fence, LAYOUT, run_id, 2, host=HOST, arena=trainer.arena)
    service = WeightService(
        trainer.port, Service("weights"), name="weights", run_id=run_id, host=HOST, lease_s=1.0, block_ms=100,
        metrics=Metrics(run_id, "weights"), arena=trainer.arena,
    )  # fmt: skip
    assert await service.collect_once() == []
    assert trainer.arena.segments() == [dead]
    version = PolicyVersion(fence.incarnation, 0)
    assert await publisher.publish(version, tensors(0))
    assert [name.version for name in trainer.arena.segments()] == [version]
    await publisher.close()
    await publisher.close()
    with pytest.raises(WeightError, match="its publisher is closed"):
        await publisher.publish(version, tensors(0))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda values: values.pop("norm"), "'norm' is missing"),
        (lambda values: values.update(extra=torch.zeros(1)), "'extra' is not in the layout"),
        (lambda values: values.update(norm=torch.zeros(8)), r"'norm' has shape \[8\]"),
    ],
    ids=["missing", "unknown", "shape"],
)
async def test_tensors_that_do_not_fit_are_named(
    trainer: Trainer, change: Callable[[dict[str, torch.Tensor]], object], sentence: str
) -> None:
    values = tensors(0)
    change(values)
    with pytest.raises(WeightError, match=sentence):
        await trainer.publisher.publish(trainer.version(0), values)
    assert trainer.arena.segments() == []


async def test_version_of_another_incarnation_is_refused(trainer: Trainer) -> None:
    with pytest.raises(WeightError, match=f"this trainer is incarnation {trainer.fence.incarnation}"):
        await trainer.publisher.publish(PolicyVersion(trainer.fence.incarnation + 1, 0), tensors(0))


async def test_strided_and_already_cast_tensors_are_published_as_they_are(trainer: Trainer) -> None:
    values = tensors(3)
    values["embed"] = values["embed"].bfloat16().T.contiguous().T
    assert not values["embed"].is_contiguous()
    assert await trainer.publisher.publish(trainer.version(0), values)
    manifest = await trainer.manifest(0)
    data = trainer.arena.open(manifest.segment, LAYOUT.nbytes)
    assert data is not None
    assert data.tobytes() == flat(values)
