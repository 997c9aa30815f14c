"""The end of a producer: ordered, by the run's status, by a signal, and all of that while Redis is away."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from broker.api import Order, RunStatus
from tests.producers import Scene, Setting, settings
from tests.support import RedisProcess, wait_until


@pytest.fixture
async def setting(
    run_id: str, redis_process: Callable[..., RedisProcess]
) -> AsyncIterator[tuple[Setting, RedisProcess]]:
    server = redis_process("--appendfsync", "always")
    async with settings(server.url, run_id) as make:
        yield make, server


async def playing(make: Setting, processes: list[subprocess.Popen[str]], **engine: Any) -> Scene:
    """A process that holds three tasks, of which it can finish none."""
    change = {"producer": {"drain_s": 1.0, "lease_s": 1.0}, "broker": {"connect_timeout_s": 1.0}}
    scene = await make(change=change, **{"step_s": 100.0, **engine})
    await scene.trainer.publish(0)
    await scene.trainer.admit("task-1", "task-2", "task-3")
    processes.append(scene.process("p1"))

    async def held() -> bool:
        return await scene.held() == 3

    await wait_until(held, "all tasks are held", 60)
    return scene


async def left(process: subprocess.Popen[str]) -> str:
    """Its log, once it has ended well."""
    _, said = await asyncio.to_thread(process.communicate, timeout=60)
    assert process.returncode == 0, said
    assert "Traceback" not in said
    return said


@pytest.mark.parametrize("status", ["finished", "failed"])
async def test_a_run_that_has_ended_ends_its_producers_without_an_order(
    setting: tuple[Setting, RedisProcess], processes: list[subprocess.Popen[str]], status: RunStatus
) -> None:
    make, _ = setting
    scene = await playing(make, processes)
    await scene.trainer.port.set_status(status, "it is over")
    assert f"p1 stops: the run is {status}" in await left(processes[0])
    assert await scene.held() == 0


async def test_the_end_reaches_a_producer_whose_redis_was_away(
    setting: tuple[Setting, RedisProcess], processes: list[subprocess.Popen[str]]
) -> None:
    make, server = setting
    scene = await playing(make, processes)
    server.kill()
    server.start()
    await scene.trainer.port.finish(scene.trainer.fence, "finished", "all steps are done")
    said = await left(processes[0])
    assert "p1 stops: " in said
    assert await scene.held() == 0


@pytest.mark.parametrize("outage", ["before", "after"])
async def test_sigterm_ends_it_while_redis_is_away(
    setting: tuple[Setting, RedisProcess], processes: list[subprocess.Popen[str]], outage: str
) -> None:
    make, server = setting
    scene = await playing(make, processes)
    if outage == "after":
        processes[0].send_signal(signal.SIGTERM)
    server.kill()
    if outage == "before":
        await asyncio.to_thread(_says, processes[0], "cannot be reached")
        processes[0].send_signal(signal.SIGTERM)
    assert "p1 leaves without a goodbye" in await left(processes[0])
    server.start()
    # Whoever comes next gets what it held.
    async with scene.producer("heir") as heir:
        await wait_until(lambda: len(heir.jobs.held) == 3, "all tasks were taken over")
        await scene.trainer.port.order(Order("", "stop"))
        await wait_until(heir.service.stopping.is_set, "the order has come")


def _says(process: subprocess.Popen[str], text: str) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        if text in line:
            return


async def test_a_finished_group_waits_for_redis_as_long_as_the_drain_lasts(
    setting: tuple[Setting, RedisProcess],
) -> None:
    make, server = setting
    change = {"producer": {"drain_s": 60.0}, "broker": {"connect_timeout_s": 0.2}}
    scene = await make(change=change, step_s=0.01, length_mean=1000.0, length_sigma=0.0)
    await scene.trainer.publish(0)
    async with scene.producer() as producer:
        await scene.trainer.admit("task-1")
        await wait_until(lambda: len(producer.jobs.held) == 1, "the task is held")
        server.kill()
        await wait_until(lambda: producer.jobs.phase() == "wait_broker", "it waits for Redis")
        producer.service.stop("as SIGTERM does")
        await wait_until(lambda: producer._running == {"take", "renew", "heartbeat"}, "the others have given up")
        server.start()
        await scene.trainer.receive("task-1")
    assert scene.trainer.groups["task-1"].group.outcome == "played"
