"""Who looks for dead producers, and when: one for all, and at once where one is known to have gone."""

from __future__ import annotations

import redis

from broker.api import Hello, Peer, RunRecord
from broker.connect import Run
from broker.messages import SCHEMA
from tests.reigns import begun
from tests.servers import RedisProcess

TASKS = 12


def looks(server: RedisProcess) -> int:
    """How often all consumers of a stream were asked for."""
    with redis.Redis.from_url(server.admin_url) as client:
        stats = client.info("commandstats")
    return sum(figures["calls"] for name, figures in stats.items() if name.startswith("cmdstat_xinfo"))


async def test_one_look_for_the_dead_serves_all_producers(
    run: Run, record: RunRecord, redis_server: RedisProcess
) -> None:
    await begun(run, *(f"t{number}" for number in range(TASKS)))
    for number in range(8):
        await run.heartbeat(Peer(f"p{number}", "producer", "host", 1, True, {}), 3600.0)
    before = looks(redis_server)
    for number in range(8):
        (delivery,) = await run.take(f"p{number}", 1, 0)
        assert (delivery.task.task_id, delivery.attempt) == (f"t{number}", 1)
    assert looks(redis_server) == before + 1
    await run.retire("p3")
    (left,) = await run.take("p0", 1, 0)
    assert (left.task.task_id, left.attempt) == ("t3", 2), "what a producer left that has gone comes first"
    await run.join(Hello("p5", SCHEMA, record.digests, "host", 1))
    (left,) = await run.take("p0", 1, 0)
    assert (left.task.task_id, left.attempt) == ("t5", 2)
    (new,) = await run.take("p0", 1, 0)
    assert (new.task.task_id, new.attempt) == ("t8", 1)
