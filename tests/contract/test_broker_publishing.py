"""Groups that are published at the same moment: each has its own answer, and together they cost few round trips."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import redis

from broker.api import Peer, RunRecord
from broker.connect import connect_run, connect_runs
from tests.conftest import BROKER, Services
from tests.servers import RedisProcess
from tests.support import make_group, make_task

TASKS = 40


async def test_groups_that_are_published_at_once_have_each_its_own_answer(service: Services) -> None:
    trainer, producer, other = service(), service(), service()
    fence = await trainer.take_fence(0)
    await trainer.admit(fence, [make_task(f"t{number}") for number in range(TASKS)])
    for run, name in ((producer, "p0"), (other, "p1")):
        await run.heartbeat(Peer(name, "producer", "host", 1, True, {}), 30.0)
    mine = await producer.take("p0", TASKS - 1, 0)
    (theirs,) = await other.take("p1", TASKS, 0)
    foreign, *own, twice = await asyncio.gather(
        *(producer.publish("p0", one, make_group(one.task, 1, "p0")) for one in (theirs, *mine, mine[0]))
    )
    # Which of the two comes first, nobody says.
    assert (foreign, {own[0], twice}) == ("superseded", {"published", "repeated"})
    assert own[1:] == ["published"] * (len(mine) - 1)
    arrived = await trainer.take_groups(fence, TASKS, 0)
    assert {one.group.task_id for one in arrived} == {one.task.task_id for one in mine}
    assert len(arrived) == len(mine)
    assert await other.publish("p1", theirs, make_group(theirs.task, 1, "p1")) == "published"


async def test_groups_that_wait_together_go_in_few_scripts(
    redis_process: Callable[..., RedisProcess], record: RunRecord
) -> None:
    server = redis_process()
    run = connect_run(server.url, record.run_id, BROKER)
    with redis.Redis.from_url(server.url) as raw:
        await _runs(server.url, record)
        fence = await run.take_fence(0)
        await run.admit(fence, [make_task(f"t{number}") for number in range(TASKS)])
        await run.heartbeat(Peer("p0", "producer", "host", 1, True, {}), 30.0)
        taken = await run.take("p0", TASKS, 0)
        before = raw.info("commandstats")["cmdstat_evalsha"]["calls"]
        await asyncio.gather(*(run.publish("p0", one, make_group(one.task, 1, "p0")) for one in taken))
        assert raw.info("commandstats")["cmdstat_evalsha"]["calls"] - before <= 3
        assert raw.xlen(f"{{hr:{record.run_id}}}:groups") == TASKS
    await run.close()


async def test_a_service_that_leaves_while_redis_is_away_waits_no_longer(
    redis_process: Callable[..., RedisProcess], record: RunRecord
) -> None:
    server = redis_process()
    run = connect_run(server.url, record.run_id, BROKER)
    await _runs(server.url, record)
    fence = await run.take_fence(0)
    await run.admit(fence, [make_task("a"), make_task("b")])
    await run.heartbeat(Peer("p0", "producer", "host", 1, True, {}), 30.0)
    taken = await run.take("p0", 2, 0)
    server.kill()
    publishing = [asyncio.create_task(run.publish("p0", one, make_group(one.task, 1, "p0"))) for one in taken]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    async with asyncio.timeout(20):
        await run.close()
    for one in publishing:
        with pytest.raises(asyncio.CancelledError):
            await one


async def _runs(url: str, record: RunRecord) -> None:
    runs = connect_runs(url, BROKER)
    await runs.create(record)
    await runs.close()
