"""What a run leaves in Redis and in its processes does not grow with the groups that pass through."""

from __future__ import annotations

import gc
import sys
from collections.abc import AsyncIterator

import pytest
import redis

from benchmarks import fleet
from benchmarks.fleet import LightConsumer, LightProducer, serving
from benchmarks.message_path import pool, record_of
from broker.api import Runs
from broker.connect import connect_run

GROUPS = 150
"""Of one part."""
NODE = 100
"""Entries of a stream that Redis drops at once."""
BOUNDS = {
    "broker.redis.outbox.KEEP_PUBLISHED": 32,
    "broker.redis.trainer.KEEP_SETTLED": 32,
    "broker.held.KEEP_SETTLED": 32,
    "broker.redis.trainer.MAX_STEPS": 32,
    "broker.redis.weights.MAX_HEADS": 32,
}
WINDOW = 16
LENGTHS = {b"stream": "XLEN", b"hash": "HLEN", b"zset": "ZCARD", b"list": "LLEN"}


@pytest.fixture
async def consumer(
    redis_url: str, runs: Runs, run_id: str, no_key_left: None, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[LightConsumer]:
    """A trainer's way with groups, of a run whose bounds are reached soon; each step has one group."""
    for name, bound in BOUNDS.items():
        monkeypatch.setattr(name, bound)
    monkeypatch.setattr(fleet, "BLOCK_MS", 50)
    await runs.create(record_of(run_id))
    run = connect_run(redis_url, run_id)
    consumer = LightConsumer(run, await run.take_fence(0), WINDOW, groups_per_step=1)
    await consumer.begin()
    yield consumer
    await run.close()
    await runs.delete(run_id)


async def part(consumer: LightConsumer, redis_url: str, run_id: str, names: tuple[str, ...]) -> int:
    """Let so many groups pass, by producers that join and leave; returns how many objects are left."""
    async with serving([LightProducer(redis_url, run_id, name, pool(16)) for name in names]):
        await consumer.play(GROUPS)
    gc.collect()
    return sys.getallocatedblocks()


async def test_nothing_grows_with_the_groups_that_pass(consumer: LightConsumer, redis_url: str, run_id: str) -> None:
    await part(consumer, redis_url, run_id, ("p0", "p1"))
    before = await part(consumer, redis_url, run_id, ("p2", "p3"))
    after = await part(consumer, redis_url, run_id, ("p4", "p5"))
    assert after - before < GROUPS / 2, "something of each group is kept"
    with redis.Redis.from_url(redis_url) as client:
        lengths = {
            key.decode().partition("}:")[2]: client.execute_command(LENGTHS[kind], key)
            for key in client.scan_iter(f"{{hr:{run_id}}}:*")
            if (kind := client.type(key)) in LENGTHS
        }
    assert consumer.step > 2 * GROUPS
    assert lengths.pop("published") == 32
    assert lengths.pop("settled") <= 32
    assert lengths.pop("groups") <= 32
    assert lengths.pop("steps") <= 32 + NODE
    assert lengths.pop("heads") <= 32 + NODE
    assert lengths.pop("manifests") == fleet.MAX_LIVE_VERSIONS
    assert max(lengths.values()) <= 40, lengths
