"""Versions that an engine reads where its host's trainer has put them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from broker.connect import Run
from tests.support import wait_until
from tests.weights import LAYOUT, MappingEngine, Trainer, flat, flip, receiving, tensors, training
from weightsync.arena import Arena


@pytest.fixture
async def trainer(run: Run, run_id: str, tmp_path: Path) -> AsyncIterator[Trainer]:
    async with training(run, run_id, Arena(tmp_path), max_live=3) as made:
        yield made


async def test_versions_are_read_in_place_and_stay_readable_once_they_are_freed(trainer: Trainer) -> None:
    engine = MappingEngine()
    async with receiving(trainer, engine) as receiver:
        for step in range(1, 8):
            assert await trainer.publish(step)
            await wait_until(lambda step=step: engine.version == trainer.version(step), f"version {step} is there")
            assert not engine.back.any(), "nothing was copied"
        assert receiver.stats().staged_bytes == 0
        assert receiver.stats().commits == len(engine.history)
        await trainer.publisher.close()
        assert trainer.live == []
        assert engine.front.tobytes() == flat(tensors(7), LAYOUT)


async def test_what_is_written_into_a_version_in_place_changes_nobody_elses(trainer: Trainer) -> None:
    engine = MappingEngine()
    async with receiving(trainer, engine):
        assert await trainer.publish(1)
        await wait_until(lambda: engine.version == trainer.version(1), "version 1 is there")
        engine.front[:] = 0
        assert (await trainer.file(1)).read_bytes()[: LAYOUT.nbytes] == flat(tensors(1), LAYOUT)


async def test_a_version_that_is_damaged_is_not_taken_in_place(trainer: Trainer) -> None:
    engine = MappingEngine()
    assert await trainer.publish(1)
    file = await trainer.file(1)
    flip(file, 3)
    async with receiving(trainer, engine) as receiver:
        await wait_until(lambda: receiver.stats().damaged >= 2, "it is found to be damaged")
        assert engine.version is None
        flip(file, 3)
        await wait_until(lambda: engine.version == trainer.version(1), "it is taken once it is whole")


async def test_a_version_that_was_freed_is_followed_by_the_next(trainer: Trainer) -> None:
    engine = MappingEngine()
    assert await trainer.publish(1)
    (await trainer.file(1)).unlink()
    async with receiving(trainer, engine) as receiver:
        await wait_until(lambda: receiver.stats().vanished >= 1, "it is gone")
        assert await trainer.publish(2)
        await wait_until(lambda: engine.version == trainer.version(2), "the next one is there")
