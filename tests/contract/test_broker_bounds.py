"""Whatever a run does for however long, no key of it grows beyond its bound, and each key has one."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable

import pytest
import redis

from broker import bounds
from broker.api import Order, Peer, RunRecord
from broker.keys import Keys
from broker.messages import StepEntry, StepRecord
from broker.redis.scripts import scripts
from headrace.version import PolicyVersion
from tests.servers import RedisProcess
from tests.sites import Site
from tests.support import make_group, make_task

NODE = 100
"""Entries of one node of a stream, at which it is cut."""
FACTOR = 1.2
"""So much more than its bound is asked of each thing."""


@pytest.fixture
async def site(redis_process: Callable[..., RedisProcess], record: RunRecord) -> AsyncIterator[Site]:
    site = await Site(redis_process("--appendonly", "no"), record).begin()
    yield site
    await site.close()


def test_each_key_has_its_bound() -> None:
    assert bounds.__doc__ is not None
    said = {name for line in re.findall(r"^(\S.*?)  ", bounds.__doc__, re.MULTILINE) for name in line.split(", ")}
    assert {name for script in scripts().values() for name in script.keys} == said - {"beat:<name>"}


def length(client: redis.Redis, key: str) -> int:
    of = {b"hash": client.hlen, b"list": client.llen, b"zset": client.zcard, b"stream": client.xlen, b"none": len}
    return int(of[client.type(key)](key)) if client.exists(key) else 0


async def work(site: Site, rounds: int) -> None:
    """Tasks to the end, each with a reason of its own."""
    producer = await site.producer()
    for first in range(rounds):
        names = [f"t{first}-{number}" for number in range(32)]
        await site.trainer.admit(site.fence, [make_task(name) for name in names])
        for number, delivery in enumerate(await producer.take("p0", 32, 0)):
            vocab = 9000 if number % 16 == 0 else 100
            await producer.publish("p0", delivery, make_group(delivery.task, delivery.attempt, "p0", vocab=vocab))
        taken = await site.trainer.take_groups(site.fence, 32, 0)
        await site.trainer.settle(
            site.fence, [StepEntry(one.entry_id, one.group.task_id, "stale", one.group.task_id) for one in taken]
        )
        for letter in await site.operator.dead("", 2) if first % 4 == 0 else ():
            await site.operator.replay_dead(letter.letter_id)


async def test_no_key_grows_beyond_its_bound(site: Site) -> None:
    run, fence = site.trainer, site.fence
    await work(site, 25)
    for number in range(round(FACTOR * bounds.MAX_MANIFESTS)):
        await run.publish_head(fence, PolicyVersion(1 + number // 8, number), b"manifest")
    for number in range(round(FACTOR * bounds.MAX_ORDERS)):
        await run.order(Order("", "scale", count=number % 4))
    for number in range(300):
        await run.append_step(fence, StepRecord(PolicyVersion(1, number), ()))
        await run.lease(PolicyVersion(1, number), "reader", 0.001)
        await run.heartbeat(Peer(f"p{number}", "producer", "host", 1, True, {}), 0.001)
    await site.finish()
    keys, sizes = Keys(site.record.run_id), {}
    with site.admin() as client:
        for key in client.scan_iter("*", count=1000):
            name = key.decode().removeprefix(keys.of(""))
            if not name.startswith("beat:") and name != "record":
                sizes[name] = length(client, key.decode())
    most = {
        "state": 16,
        "sheet": bounds.MAX_REASONS + 16,
        "groups": bounds.KEEP_SETTLED,
        "settled": bounds.KEEP_SETTLED,
        "published": bounds.KEEP_PUBLISHED,
        "manifests": bounds.MAX_MANIFESTS,
        "reigns": bounds.MAX_REIGNS,
        "heads": bounds.MAX_HEADS + NODE,
        "orders": bounds.MAX_ORDERS + NODE,
        "steps": bounds.MAX_STEPS + NODE,
        "dead": bounds.MAX_DEAD,
        "peers": bounds.MAX_PEERS,
        "tasks": 0,
        # Those of the last millisecond.
        "leases": 16,
    }
    assert sizes.keys() <= most.keys()
    assert {name: size for name, size in sizes.items() if size > most[name]} == {}
