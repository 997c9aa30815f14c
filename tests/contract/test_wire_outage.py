"""The producer of another make while its Redis is full, and gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from broker.api import Fence, RunRecord
from broker.connect import Run, connect_run, connect_runs
from deploy.scripts import write_scripts
from headrace.version import PolicyVersion
from tests.conftest import BROKER
from tests.foreign import foreign
from tests.servers import RedisProcess
from tests.support import make_task, wait_until


@pytest.fixture
def server(redis_process: Callable[..., RedisProcess]) -> RedisProcess:
    return redis_process("--appendfsync", "always")


@pytest.fixture
async def run(server: RedisProcess, record: RunRecord) -> AsyncIterator[Run]:
    runs, run = connect_runs(server.url, BROKER), connect_run(server.url, record.run_id, BROKER)
    await runs.create(record)
    yield run
    await run.close()
    await runs.close()


@pytest.fixture
async def fence(run: Run) -> Fence:
    fence = await run.take_fence(0)
    await run.publish_head(fence, PolicyVersion(fence.incarnation, 0), b"a manifest")
    await run.admit(fence, [make_task("t")])
    return fence


@pytest.fixture
def producer(server: RedisProcess, record: RunRecord, fence: Fence, tmp_path: Path) -> Any:
    """It holds the only task."""
    write_scripts(tmp_path)
    producer = foreign.Producer(server.url, record.run_id, "foreign", tmp_path)
    producer.join()
    producer.look_at_head()
    assert len(producer.take(1)) == 1
    yield producer
    producer.redis.close()


@pytest.fixture
def met(producer: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the producer waited for."""
    reasons: list[str] = []
    wait = producer.wait

    def noted(error: redis.RedisError, give_up: float) -> None:
        reasons.append(type(error).__name__)
        wait(error, give_up)

    monkeypatch.setattr(producer, "wait", noted)
    return reasons


async def test_while_redis_is_full_it_lives_and_keeps_its_group(
    run: Run, fence: Fence, producer: Any, met: list[str], server: RedisProcess
) -> None:
    (entry,) = producer.held
    with redis.Redis.from_url(server.admin_url) as admin:
        admin.config_set("maxmemory", 1)
        producer.beat()
        assert (list(producer.held), met) == ([entry], []), "what keeps a producer alive works"
        publishing = asyncio.create_task(asyncio.to_thread(producer.finish, entry))
        await wait_until(lambda: bool(met), "it waits for room")
        admin.config_set("maxmemory", 0)
    assert await asyncio.wait_for(publishing, 30) == "published"
    assert len(await run.take_groups(fence, 1, 5000)) == 1


async def test_while_redis_is_away_it_keeps_its_group(
    run: Run, fence: Fence, producer: Any, met: list[str], server: RedisProcess
) -> None:
    (entry,) = producer.held
    server.kill()
    publishing = asyncio.create_task(asyncio.to_thread(producer.finish, entry))
    await wait_until(lambda: bool(met), "it looks for Redis")
    server.start()
    assert await asyncio.wait_for(publishing, 30) == "published"
    assert "ConnectionError" in met
    assert len(await run.take_groups(fence, 1, 5000)) == 1


async def test_when_redis_was_emptied_its_task_comes_again(
    run: Run, fence: Fence, producer: Any, met: list[str], server: RedisProcess
) -> None:
    (entry,) = producer.held
    with redis.Redis.from_url(server.admin_url) as admin:
        admin.flushall()
    publishing = asyncio.create_task(asyncio.to_thread(producer.finish, entry))
    await wait_until(lambda: bool(met), "it waits for the run")
    assert await run.take_groups(fence, 1, 100) == []
    assert await asyncio.wait_for(publishing, 30) == "superseded"
    (again,) = await asyncio.to_thread(producer.take, 1)
    assert producer.finish(again) == "published"
    assert [delivery.group.task_id for delivery in await run.take_groups(fence, 1, 5000)] == ["t"]
    (sheet,) = [sheet for sheet in await run.balance() if sheet.kind == "train"]
    assert (sheet.admitted, sheet.outstanding, sheet.verdicts) == (2, 1, {"lost": 1})


async def test_when_redis_is_emptied_while_it_waits_for_a_task_one_comes(
    run: Run, fence: Fence, producer: Any, met: list[str], server: RedisProcess
) -> None:
    (entry,) = producer.held
    assert producer.finish(entry) == "published"
    taking = asyncio.create_task(asyncio.to_thread(taken, producer))
    with redis.Redis.from_url(server.admin_url) as admin:
        await wait_until(lambda: b"cmd=xreadgroup" in admin.execute_command("CLIENT", "LIST"), "it waits for a task")
        admin.flushall()
    await wait_until(lambda: bool(met), "it waits for the run")
    assert await run.take_groups(fence, 1, 100) == [], "the trainer finds its group lost, and asks again"
    assert await asyncio.wait_for(taking, 30) == ["t"]


def taken(producer: Any) -> list[str]:
    """Tasks, as soon as there are some."""
    while not (found := producer.take(1, 4000)):
        pass
    return [producer.held[entry]["task"] for entry in found]


async def test_a_run_that_was_deleted_is_left(run: Run, producer: Any, server: RedisProcess, record: RunRecord) -> None:
    runs = connect_runs(server.url, BROKER)
    await runs.delete(record.run_id)
    await runs.close()
    with pytest.raises(foreign.Left, match="is gone"):
        producer.beat()
