"""A producer whose Redis fails: it plays on, waits and says so, publishes afterwards, and plays nothing twice."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio as aioredis

from producers.loops import Producer
from tests.producers import LEASE_S, Scene, Setting, counted, page, settings
from tests.support import RedisProcess, wait_until

NAMES = ("task-1", "task-2", "task-3")
TOKENS = len(NAMES) * 4 * 32
"""Of all tasks, each rollout of which is as long as it may be."""


@pytest.fixture
async def setting(
    run_id: str, redis_process: Callable[..., RedisProcess]
) -> AsyncIterator[tuple[Setting, RedisProcess]]:
    """With a Redis of the test's own, which outlives the scene; everything that it has answered is on the disk."""
    server = redis_process("--appendfsync", "always")
    async with settings(server.url, run_id) as make:
        yield make, server


async def slow(setting: Setting, tmp_path: Path, step_s: float = 0.02, **change: Any) -> Scene:
    return await setting(folder=str(tmp_path), change=change, step_s=step_s, length_mean=1000.0, length_sigma=0.0)


async def held(scene: Scene, producer: Producer, *names: str) -> None:
    await scene.trainer.publish(0)
    await scene.trainer.admit(*names)
    await wait_until(lambda: len(producer.jobs.held) == len(names), "all tasks are held")


async def decoded(producer: Producer) -> None:
    stats = producer.jobs.stage.player.engine.stats
    await wait_until(lambda: stats().busy_slots == stats().waiting == 0, "all are decoded without the broker")
    await wait_until(lambda: producer.jobs.phase() == "wait_broker", "all are scored")


async def healthz(producer: Producer) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(await page(producer.metrics_url.replace("/metrics", "/healthz")))
    return said


async def says(producer: Producer, why: str) -> None:
    async def said() -> bool:
        return why in (await healthz(producer)).get("outage", "")

    await wait_until(said, f"/healthz says {why!r}")


async def all_came(scene: Scene, producer: Producer) -> None:
    """Each task has one group, whole, and was played once."""
    await scene.trainer.receive(*NAMES)
    for name in NAMES:
        group = scene.trainer.groups[name].group
        assert (group.outcome, len(group.trajectories)) == ("played", 4)
    assert producer.jobs.stage.player.engine.stats().decoded_tokens == TOKENS
    await wait_until(lambda: not producer.jobs.held, "nothing is held any more")
    assert await counted(producer, "tasks_lost_total") == 0


async def test_groups_of_an_outage_are_published_after_it(
    setting: tuple[Setting, RedisProcess], tmp_path: Path
) -> None:
    make, server = setting
    scene = await slow(make, tmp_path, broker={"connect_timeout_s": 0.5})
    async with scene.producer() as producer:
        await held(scene, producer, *NAMES)
        server.kill()
        await decoded(producer)
        begun = time.monotonic()
        await says(producer, "cannot be reached")
        assert await counted(producer, "outage") == 1
        # Longer than a first contact would wait.
        await wait_until(lambda: time.monotonic() - begun > 1.0, "a second has passed")
        assert len(producer.jobs.held) == len(NAMES)
        server.start()
        await all_came(scene, producer)
        await wait_until(lambda: not producer.jobs.outage, "it knows that Redis is back")
        assert "outage" not in await healthz(producer)
        assert await counted(producer, "outage_seconds_total") > 1.0
    events = [json.loads(line) for line in (tmp_path / "p1.jsonl").read_text().splitlines()]
    told = [line["event"] for line in events if line["event"].startswith("outage")]
    assert told == ["outage", "outage_over"]


async def test_a_redis_without_memory_is_waited_for(setting: tuple[Setting, RedisProcess], tmp_path: Path) -> None:
    make, server = setting
    scene = await slow(make, tmp_path)
    async with aioredis.Redis.from_url(server.admin_url) as admin, scene.producer() as producer:
        await held(scene, producer, *NAMES)
        await admin.config_set("maxmemory", 1)
        await decoded(producer)
        begun = time.monotonic()
        await says(producer, "is full (maxmemory)")

        async def told() -> bool:
            state = await scene.peer("p1")
            reasons = [trouble["reason"] for trouble in state.get("troubles", ())]
            return state.get("phase") == "wait_broker" and len(reasons) == 1 and "is full" in reasons[0]

        await wait_until(told, "its heartbeat says what it waits for")
        await wait_until(lambda: time.monotonic() - begun > 1.5 * LEASE_S, "its leases would have run out")
        assert await scene.held() == len(NAMES)
        await admin.config_set("maxmemory", 0)
        await all_came(scene, producer)
    assert {delivery.group.attempt for delivery in scene.trainer.groups.values()} == {1}


async def test_cut_connections_lose_nothing(setting: tuple[Setting, RedisProcess], tmp_path: Path) -> None:
    make, server = setting
    scene = await slow(make, tmp_path)
    async with aioredis.Redis.from_url(server.admin_url) as admin, scene.producer() as producer:
        enough = asyncio.Event()
        cutting = asyncio.create_task(cut_again_and_again(admin, enough))
        await held(scene, producer, *NAMES)
        await decoded_or_published(producer)
        enough.set()
        await cutting
        await all_came(scene, producer)


async def cut_again_and_again(admin: aioredis.Redis, enough: asyncio.Event) -> None:
    """Ever less often, so that also on a slow disk a call comes through in the end.

    By a flag, because the client may lose a cancellation.
    """
    pause_s = 0.05
    while not enough.is_set():
        await admin.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        await asyncio.sleep(pause_s)
        pause_s *= 1.2


async def decoded_or_published(producer: Producer) -> None:
    stats = producer.jobs.stage.player.engine.stats
    await wait_until(lambda: stats().decoded_tokens == TOKENS, "all are decoded")


async def test_an_emptied_redis_gets_its_run_back_and_its_groups(
    setting: tuple[Setting, RedisProcess], tmp_path: Path
) -> None:
    make, server = setting
    scene = await slow(make, tmp_path, step_s=0.1)
    async with aioredis.Redis.from_url(server.admin_url) as admin, scene.producer() as producer:
        await held(scene, producer, *NAMES)
        await admin.flushall()
        # The trainer's own port puts the run back at its next call, and admits anew what was outstanding.
        await all_came(scene, producer)
        assert scene.trainer.port.mended == 1
        await scene.trainer.publish(1)
        await wait_until(lambda: producer.version == scene.trainer.version(1), "it follows the versions again")


async def test_tasks_whose_taking_was_lost_are_not_played_twice(
    setting: tuple[Setting, RedisProcess], tmp_path: Path
) -> None:
    make, server = setting
    scene = await slow(make, tmp_path, step_s=0.1)
    await scene.trainer.publish(0)
    await scene.trainer.admit(*NAMES)
    size = server.append_only_file.stat().st_size
    async with scene.producer() as producer:
        await wait_until(lambda: len(producer.jobs.held) == len(NAMES), "all tasks are held")
        server.kill()
        with server.append_only_file.open("r+b") as file:
            file.truncate(size)
        server.start()
        await all_came(scene, producer)


async def test_an_outage_that_ends_with_the_connection_is_not_written_down(
    setting: tuple[Setting, RedisProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection is closed last, and a call that it ends may still say so: the journal is closed by then."""
    make, _ = setting
    scene = await slow(make, tmp_path)
    watching: list[Callable[[str], None]] = []
    async with scene.producer() as producer:
        monkeypatch.setattr(producer.port, "watch", watching.append)
    for told in [producer.jobs.on_outage, *watching][-1:]:
        told("away")
        told("")


async def test_a_run_that_was_deleted_is_an_end(setting: tuple[Setting, RedisProcess], tmp_path: Path) -> None:
    from broker.connect import connect_runs
    from headrace.errors import Refused
    from headrace.invocation import Invocation
    from headrace.service import Service
    from producers.start import start

    make, server = setting
    scene = await slow(make, tmp_path)
    service = Service("p1")
    await start(service, Invocation(server.url, scene.record.run_id, "p1"))
    running = asyncio.create_task(service.run())
    await wait_until(lambda: _known(scene), "it has joined")
    runs = connect_runs(server.url)
    await runs.delete(scene.record.run_id)
    await runs.close()
    with pytest.raises(Refused, match="was deleted"):
        await asyncio.wait_for(running, 60)


async def _known(scene: Scene) -> bool:
    return await scene.peer("p1") != {}
