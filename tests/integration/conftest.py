"""Fixtures of the tests with whole trainers and producers."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from broker.api import Hello, RunRecord
from broker.connect import Run, connect_run, connect_runs
from broker.messages import SCHEMA
from headrace.policy.loading import model_digests
from tests.servers import RedisProcess
from tests.tiny import VOCABULARY
from tests.trainers import BROKER, Begin, Player, Trainers, config

if TYPE_CHECKING:
    from tests.producers import Setting


@pytest.fixture
async def setting(
    redis_url: str, run_id: str, no_key_left: None, redis_process: Callable[..., RedisProcess]
) -> AsyncIterator[Setting]:
    """Makes the scene of a producer's test. A Redis that the test started outlives it."""
    # Loads torch.
    from tests.producers import settings

    async with settings(redis_url, run_id) as make:
        yield make


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that a test starts; none is left afterwards."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.wait(20)
        if process.stderr is not None:
            process.stderr.close()


@pytest.fixture
def trainers(redis_url: str, run_id: str, tmp_path: Path) -> Iterator[Trainers]:
    made = Trainers(redis_url, run_id, tmp_path)
    yield made
    for process in made.started:
        process.kill()
        process.wait(60)


@pytest.fixture
async def begin(
    redis_url: str, run_id: str, tiny_model: Path, tmp_path: Path, no_key_left: None
) -> AsyncIterator[Begin]:
    """Creates the run and a player: `port, player, folder = await begin(trainer={…})`. With `beside` it is another run
    than the test's, whose id and folder end so."""
    runs = connect_runs(redis_url, BROKER)
    ports: list[Run] = []
    players: list[tuple[Player, asyncio.Task[None]]] = []

    made: list[str] = []

    async def make(*, beside: str = "", **sections: dict[str, Any]) -> tuple[Run, Player, Path]:
        made.append(f"{run_id}{beside}")
        folder = tmp_path / f"run{beside}"
        record = RunRecord(
            made[-1],
            SCHEMA,
            config(tiny_model, **sections).model_dump(mode="json"),
            model_digests(tiny_model),
            VOCABULARY,
            int(time.time() * 1000),
            str(folder),
            {"train/arithmetic": 50, "eval/arithmetic": 5},
        )
        folder.mkdir()
        await runs.create(record)
        ports.extend(connect_run(redis_url, made[-1], BROKER) for _ in range(2))
        port, player = ports[-2], Player(ports[-1])
        await player.port.join(Hello("player", SCHEMA, record.digests, "here", os.getpid()))
        players.append((player, asyncio.create_task(player.play())))
        return port, player, folder

    yield make
    for player, task in players:
        player.ended.set()
        await task
    for port in ports:
        await port.close()
    for one in made:
        await runs.delete(one)
    await runs.close()
