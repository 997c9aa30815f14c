"""The archive has what Redis answered for, also what Redis has lost since, and goes on where Redis does."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from broker.codec import encode_step
from broker.keys import Keys
from broker.messages import StepEntry, StepRecord
from headrace.version import PolicyVersion
from tests.chaos import aof
from tests.chaos.archive import Archive
from tests.chaos.server import Server

KEYS = Keys("archived")


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    made = Server(tmp_path / "redis")
    await made.start()
    yield made
    made.crash()


@pytest.fixture
def archive(server: Server, tmp_path: Path) -> Iterator[Archive]:
    made = Archive(server.folder, KEYS.run_id, tmp_path / "store")
    yield made
    made.close()


async def log_step(server: Server, incarnation: int, step: int) -> str:
    record = StepRecord(PolicyVersion(incarnation, step), (StepEntry(f"{step}-0", f"task-{step}", "trained"),))
    async with server.client() as client:
        fields = {"version": str(record.version), "body": encode_step(record)}
        return str((await client.xadd(KEYS.of("steps"), fields, maxlen=5, approximate=True)).decode())


async def add_group(server: Server, body: bytes) -> None:
    async with server.client() as client:
        script = "return redis.call('XADD', KEYS[1], '*', 'task', 't', 'body', ARGV[1])"
        await client.eval(script, 1, KEYS.of("groups"), body)


async def test_it_has_every_entry_that_was_written_and_deleted(server: Server, archive: Archive) -> None:
    await add_group(server, b"first\r\n*1")
    await log_step(server, 1, 1)
    async with server.client() as client:
        await client.flushall()
    await add_group(server, b"second")
    archive.follow()
    assert [fields[b"body"] for _, fields in archive.entries()] == [b"first\r\n*1", b"second"]
    assert [record.version for record in archive.records] == [PolicyVersion(1, 1)]


async def test_a_killed_redis_has_lost_nothing_of_it(server: Server, archive: Archive) -> None:
    entry_id = await log_step(server, 1, 1)
    server.crash()
    await server.again()
    async with server.client() as client:
        assert [entry[0].decode() for entry in await client.xrange(KEYS.of("steps"))] == [entry_id]
    archive.follow()
    assert len(archive.records) == 1


@pytest.mark.parametrize("missing", [1, 30])
async def test_it_keeps_what_redis_loses_with_its_tail(server: Server, archive: Archive, missing: int) -> None:
    await log_step(server, 1, 1)
    archive.follow()
    await log_step(server, 1, 2)
    server.crash()
    _, end = archive.newest(1.0)
    archive.cut(end - missing)
    await server.again()
    async with server.client() as client:
        assert await client.xlen(KEYS.of("steps")) == 1
    await log_step(server, 2, 2)
    await log_step(server, 2, 3)
    archive.follow()
    assert [str(record.version) for record in archive.records] == ["1.1", "1.2", "2.2", "2.3"]
    assert [str(record.version) for record in archive.history] == ["1.1", "2.2", "2.3"]


async def test_half_a_transaction_goes_as_a_whole(server: Server, archive: Archive) -> None:
    async with server.client() as client:
        await client.eval("redis.call('SET', KEYS[1], 1) redis.call('SET', KEYS[2], 1)", 2, "first", "second")
    server.crash()
    archive.cut(aof.file_of(server.folder).read_bytes().rindex(b"second"))
    for _ in range(2):
        await server.again()
        async with server.client() as client:
            assert await client.keys() == []
            await client.eval("redis.call('SET', KEYS[1], 1) redis.call('DEL', KEYS[1])", 1, "next")
        server.crash()


async def test_the_last_second_is_what_may_be_lost(server: Server, archive: Archive) -> None:
    await log_step(server, 1, 1)
    start, end = archive.newest(0.0)
    assert start == end > 0
    await log_step(server, 1, 2)
    assert archive.newest(3600.0)[0] == 0


def test_a_transaction_is_whole_or_not_there() -> None:
    begin, inside, end = b"*1\r\n$5\r\nMULTI\r\n", b"*2\r\n$3\r\nDEL\r\n$1\r\na\r\n", b"*1\r\n$4\r\nEXEC\r\n"
    assert aof.whole(inside + begin + inside) == ([[b"DEL", b"a"]], len(inside))
    assert aof.whole(begin + inside + end) == ([[b"DEL", b"a"]], len(begin + inside + end))
    assert aof.whole(inside[:-1]) == ([], 0)
