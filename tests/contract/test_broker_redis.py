"""What only Redis can do to a run: fail, restart, fill up, lose groups, carry foreign entries."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import pytest
import redis

from broker.api import Hello, Order, Peer, RunRecord, Runs
from broker.connect import Run, connect_run, connect_runs
from broker.keys import Keys
from broker.messages import SCHEMA, StepEntry
from headrace.config import BrokerConfig
from headrace.errors import BrokerUnavailable, Refused
from headrace.version import PolicyVersion
from tests.reigns import begun, closed, reign
from tests.support import RedisProcess, make_group, make_task, wait_until

CONFIG = BrokerConfig(stream_block_ms=20_000, connect_timeout_s=10.0, max_deliveries=3)
HASTY = BrokerConfig(stream_block_ms=50, connect_timeout_s=2.0, outage_s=0.2)


@pytest.fixture
def raw(redis_server: RedisProcess) -> redis.Redis:
    with redis.Redis.from_url(redis_server.admin_url) as client:
        yield client


async def test_a_redis_that_evicts_is_refused(redis_process: Callable[..., RedisProcess]) -> None:
    runs = connect_runs(redis_process("--maxmemory-policy", "allkeys-lru").url, CONFIG)
    with pytest.raises(BrokerUnavailable, match=r"allkeys-lru.*noeviction"):
        await runs.ping()
    await runs.close()


async def test_services_go_on_after_redis_was_killed_and_restarted(
    redis_process: Callable[..., RedisProcess], record: RunRecord
) -> None:
    server = redis_process("--appendfsync", "always")
    runs = connect_runs(server.url, CONFIG)
    await runs.create(record)
    run = connect_run(server.url, record.run_id, CONFIG)
    fence = await begun(run, "a", "b")
    (delivery,) = await run.take("p0", 1, 0)
    server.kill()
    publishing = asyncio.create_task(run.publish("p0", delivery, make_group(delivery.task, 1, "p0")))
    await asyncio.to_thread(server.start)
    assert await publishing == "published"
    (arrived,) = await run.take_groups(fence, 4, 0)
    await run.settle(fence, [StepEntry(arrived.entry_id, "a", "trained")])
    assert await closed(run) == (2, 1, {"trained": 1})
    await run.close()
    await runs.close()


async def test_a_consumer_group_that_vanished_is_made_anew(run: Run, raw: redis.Redis, run_id: str) -> None:
    fence = await begun(run, "a")
    raw.xgroup_destroy(Keys(run_id).of("tasks"), "producers")
    raw.xgroup_destroy(Keys(run_id).of("groups"), "trainer")
    (delivery,) = await run.take("p0", 1, 0)
    await run.publish("p0", delivery, make_group(delivery.task, 1, "p0"))
    (arrived,) = await run.take_groups(fence, 1, 50)
    assert arrived.group.task_id == "a"


async def test_a_redis_whose_disk_refuses_is_one_sentence(
    redis_process: Callable[..., RedisProcess], record: RunRecord, tmp_path: Path
) -> None:
    (tmp_path / "disk").mkdir()
    server = redis_process("--dir", str(tmp_path / "disk"), "--appendonly", "no")
    runs = connect_runs(server.url, HASTY)
    await runs.ping()
    with redis.Redis.from_url(server.admin_url) as client:
        client.config_set("save", "3600 1")
        (tmp_path / "disk").rmdir()
        client.bgsave()
        await wait_until(lambda: client.info("persistence")["rdb_last_bgsave_status"] == "err", "Redis cannot save")
        with pytest.raises(
            BrokerUnavailable, match=r"cannot write to its disk \((Redis|Valkey) is configured to save .*gave up"
        ):
            await runs.create(record)
        client.config_set("save", "")
    await runs.create(record)
    await runs.close()


async def test_whoever_looks_on_hears_that_the_disk_refuses(
    redis_process: Callable[..., RedisProcess], record: RunRecord, tmp_path: Path
) -> None:
    (tmp_path / "disk").mkdir()
    server = redis_process("--dir", str(tmp_path / "disk"), "--appendonly", "no")
    runs = connect_runs(server.url, HASTY)
    await runs.create(record)
    operator = connect_run(server.url, record.run_id, HASTY)
    assert await operator.refusal() == ""
    with redis.Redis.from_url(server.admin_url) as client:
        client.config_set("save", "3600 1")
        (tmp_path / "disk").rmdir()
        client.bgsave()
        await wait_until(lambda: client.info("persistence")["rdb_last_bgsave_status"] == "err", "Redis cannot save")
        assert "cannot write to its disk" in await operator.refusal()
        assert await operator.peers() == []
    await operator.close()
    await runs.close()


async def test_at_maxmemory_new_work_waits_and_the_rest_goes_on(
    redis_process: Callable[..., RedisProcess], record: RunRecord
) -> None:
    server = redis_process("--maxmemory-policy", "noeviction")
    runs = connect_runs(server.url, HASTY)
    await runs.create(record)
    run = connect_run(server.url, record.run_id, HASTY)
    fence = await begun(run, "a", "b")
    first, second = await run.take("p0", 2, 0)
    await run.publish("p0", first, make_group(first.task, 1, "p0"))
    with redis.Redis.from_url(server.admin_url) as client:
        client.config_set("maxmemory", "1")
        with pytest.raises(BrokerUnavailable, match="full"):
            await run.publish("p0", second, make_group(second.task, 1, "p0"))
        await run.retire("p0")
        await run.heartbeat(Peer("p0", "producer", "host", 1, True, {}), 30.0)
        assert [peer.alive for peer in await run.peers()] == [True]
        assert await run.renew("p0", [second.entry_id]) == []
        (arrived,) = await run.take_groups(fence, 4, 0)
        await run.settle(fence, [StepEntry(arrived.entry_id, "a", "trained")])
        await run.set_step(fence, 1)
        client.config_set("maxmemory", "0")
    assert await run.publish("p0", second, make_group(second.task, 1, "p0")) == "published"
    assert await closed(run) == (2, 1, {"trained": 1})
    await run.close()
    await runs.close()


async def test_an_ended_run_leaves_by_itself_unless_it_goes_on(
    run: Run, raw: redis.Redis, run_id: str, record: RunRecord
) -> None:
    def kept_for_ever() -> set[str]:
        keys = raw.scan_iter(f"{{hr:{run_id}}}:*")
        return {key.decode().partition("}:")[2] for key in keys if raw.pttl(key) == -1}

    fence = await begun(run, "a", "b")
    (delivery,) = await run.take("p0", 1, 0)
    assert {"record", "state", "tasks"} <= kept_for_ever()
    await run.finish(fence, "finished", "done")
    assert kept_for_ever() == set()
    await run.join(Hello("p1", SCHEMA, record.digests, "host", 1))
    await run.publish("p0", delivery, make_group(delivery.task, 1, "p0"))
    await reign(run)
    assert {"record", "state", "tasks", "groups", "published"} <= kept_for_ever()
    await run.set_status("failed", "the launcher gave up")
    await run.lease(PolicyVersion(1, 1), "p1", 30.0)
    assert kept_for_ever() == set()


async def test_a_foreign_entry_among_the_orders_is_obeyed_by_nobody(run: Run, raw: redis.Redis, run_id: str) -> None:
    stream = Keys(run_id).of("orders")
    for fields in ({"nonsense": "1"}, {"kind": "scale", "count": "many"}, {"kind": "stop"}):
        raw.xadd(stream, fields)
    await run.order(Order("", "scale", target="producer", count=2))
    *foreign, order = await run.orders("0", 50)
    assert [one.kind for one in foreign] == ["", "", ""]
    assert (order.kind, order.target, order.count) == ("scale", "producer", 2)


class DeafWire:
    """Between a service and Redis: requests pass; one reply is swallowed, with the connection cut."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._server = parts.hostname, parts.port
        self._parts = parts
        self._passing: int | None = None
        self.swallowed = 0

    def swallow(self, after: int = 0) -> None:
        """Swallow one reply, after so many that pass."""
        self._passing = after

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        try:
            yield urlunsplit(self._parts._replace(netloc=f"{self._parts.netloc.rpartition('@')[0]}@127.0.0.1:{port}"))
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream, downstream = await asyncio.open_connection(*self._server)
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            await asyncio.gather(self._requests(reader, downstream), self._replies(upstream, writer))
        for side in (downstream, writer):
            side.close()

    async def _requests(self, reader: asyncio.StreamReader, downstream: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            downstream.write(data)
        downstream.write_eof()

    async def _replies(self, upstream: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await upstream.read(1 << 16):
            if self._passing == 0:
                self._passing = None
                self.swallowed += 1
                writer.transport.abort()
                return
            if self._passing is not None:
                self._passing -= 1
            writer.write(data)
        writer.write_eof()


async def test_what_a_lost_reply_carried_is_delivered_again(run: Run, redis_url: str, run_id: str) -> None:
    fence = await reign(run)
    wire = DeafWire(redis_url)
    async with wire.open() as url:
        service = connect_run(url, run_id, CONFIG)
        await service.heartbeat(Peer("p0", "producer", "host", 1, True, {}), 30.0)
        await service.record()
        await run.admit(fence, [make_task("a"), make_task("b")])
        wire.swallow()
        deliveries = await service.take("p0", 2, 0)
        assert [(one.task.task_id, one.attempt) for one in deliveries] == [("a", 2), ("b", 2)]
        wire.swallow()
        assert await service.publish("p0", deliveries[0], make_group(deliveries[0].task, 2, "p0")) == "repeated"
        assert await service.publish("p0", deliveries[1], make_group(deliveries[1].task, 2, "p0")) == "published"
        (first,) = await service.take_groups(fence, 1, 0)
        wire.swallow(after=1)
        (second,) = await service.take_groups(fence, 2, 0)
        assert (first.group.task_id, second.group.task_id) == ("a", "b")
        wire.swallow()
        entries = [StepEntry(one.entry_id, one.group.task_id, "trained") for one in (first, second)]
        await service.settle(fence, entries)
        assert wire.swallowed == 4
        assert await closed(service) == (2, 0, {"trained": 2})
        await service.close()


async def test_what_a_lost_reply_carried_to_one_that_waited_is_delivered_again(
    run: Run, redis_url: str, run_id: str, raw: redis.Redis
) -> None:
    def blocked() -> bool:
        return raw.info("clients")["blocked_clients"] > 0

    fence = await reign(run)
    wire = DeafWire(redis_url)
    async with wire.open() as url:
        service = connect_run(url, run_id, CONFIG)
        await service.heartbeat(Peer("p0", "producer", "host", 1, True, {}), 30.0)
        taking = asyncio.create_task(service.take("p0", 2, 20_000))
        await wait_until(blocked, "the producer waits")
        wire.swallow()
        await run.admit(fence, [make_task("a")])
        (delivery,) = await taking
        assert (delivery.attempt, wire.swallowed) == (2, 1)
        waiting = asyncio.create_task(service.take_groups(fence, 2, 20_000))
        await wait_until(blocked, "the trainer waits")
        wire.swallow()
        await run.publish("p0", delivery, make_group(delivery.task, 2, "p0"))
        (arrived,) = await waiting
        assert (arrived.group.task_id, wire.swallowed) == ("a", 2)
        await service.close()


async def test_deleting_is_for_good(runs: Runs, run: Run, raw: redis.Redis, run_id: str) -> None:
    fence = await begun(run, "a", "b")
    (delivery,) = await run.take("p0", 1, 0)
    waiting = asyncio.create_task(run.take_groups(fence, 1, 200))
    await wait_until(lambda: b"xreadgroup" in raw.execute_command("CLIENT", "LIST"), "the trainer waits")
    assert await runs.delete(run_id) > 5
    with contextlib.suppress(Refused):
        await waiting
    for call in (
        run.publish("p0", delivery, make_group(delivery.task, 1, "p0")),
        run.heartbeat(Peer("p0", "producer", "host", 1, True, {}), 30.0),
        run.lease(PolicyVersion(1, 1), "p0", 30.0),
        run.settle(fence, [StepEntry("1-1", "a", "trained")]),
    ):
        with pytest.raises(Refused):
            await call
    (mark,) = raw.scan_iter(f"{{hr:{run_id}}}:*")
    assert mark == Keys(run_id).of("deleted").encode()
    assert raw.pttl(mark) > 0


async def test_a_run_leaves_a_redis_that_is_full(redis_process: Callable[..., RedisProcess], record: RunRecord) -> None:
    server = redis_process()
    runs = connect_runs(server.url, HASTY)
    await runs.create(record)
    with redis.Redis.from_url(server.admin_url) as admin:
        admin.config_set("maxmemory", 1)
        assert await runs.delete(record.run_id) > 1
        (mark,) = admin.scan_iter("*")
        assert mark == Keys(record.run_id).of("deleted").encode()
    await runs.close()
