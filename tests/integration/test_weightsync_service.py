"""The weight service as a process of its own: it checks, frees, tells, and leaves nothing behind."""

from __future__ import annotations

import json
import resource
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

from broker.api import Order, Peer, RunRecord, Runs
from broker.connect import Run, connect_run, connect_runs
from headrace.config import BrokerConfig, Config, WeightsConfig
from headrace.version import PolicyVersion
from tests.servers import RedisProcess
from tests.weight_service import checked, ended, found, service
from tests.weights import flip
from weightsync.arena import Arena
from weightsync.leasing import read
from weightsync.manifest import Layout
from weightsync.publisher import Publisher

torch.set_num_threads(1)
LAYOUT = Layout.of([("w", "bfloat16", (64, 8)), ("b", "float32", (5,))])
TENSORS = {"w": torch.ones(64, 8), "b": torch.ones(5)}
WaitUntil = Callable[..., Awaitable[None]]


@pytest.fixture
def record(run_id: str, tmp_path: Path) -> RunRecord:
    """A run with short blocks and leases, whose folder is on this host."""
    broker = BrokerConfig(stream_block_ms=100, connect_timeout_s=5.0)
    config = Config(broker=broker, weights=WeightsConfig(lease_s=1.0)).model_dump(mode="json")
    (tmp_path / "run").mkdir()
    return RunRecord(run_id, 1, config, {}, vocab_size=10, folder=str(tmp_path / "run"))


@pytest.fixture
def arena(tmp_path: Path) -> Arena:
    (tmp_path / "shm").mkdir()
    return Arena(tmp_path / "shm", run_folder=tmp_path / "run")


@pytest.fixture
async def publisher(run: Run, run_id: str, arena: Arena) -> AsyncIterator[Publisher]:
    fence = await run.take_fence(0)
    publisher = Publisher(run, fence, LAYOUT, run_id, 3, arena=arena)
    yield publisher
    await publisher.close()


def events(record: RunRecord) -> list[dict[str, Any]]:
    (file,) = Path(record.folder).glob("*.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


async def test_published_versions_are_checked_and_told(
    run: Run, record: RunRecord, redis_url: str, arena: Arena, publisher: Publisher, wait_until: WaitUntil
) -> None:
    version = PolicyVersion(1, 0)
    with service(redis_url, record.run_id, arena) as process:
        assert await publisher.publish(version, TENSORS)

        async def verified() -> bool:
            return await checked(run, version) == "verified"

        await wait_until(verified, "the version is verified")
        peer = await found(run)
        assert peer is not None
        assert (peer.name, peer.pid) == (f"weights-{socket.gethostname()}-{process.pid}", process.pid)
        producer = Peer("producer-1", "producer", "h", 1, True, {"version": str(version)})
        await run.heartbeat(producer, 30)
        await run.lease(version, "producer-2", 30)
        url = peer.state["metrics_url"]
        async with aiohttp.ClientSession() as session:

            async def told() -> bool:
                async with session.get(url.replace("/metrics", "/healthz")) as answer:
                    assert answer.status == 200
                    page = (await answer.json())["versions"][str(version)]
                return page["on_it"] == ["producer-1"] and page["readers"] == ["producer-2"]

            await wait_until(told, "/healthz says who reads and who is on the version")
            async with session.get(url) as answer:
                text = await answer.text()
        assert 'headrace_weights_versions_total{check="verified"' in text
        assert 'headrace_phase_seconds_total{lane="verifier"' in text
        process.send_signal(signal.SIGTERM)
        code, said = await ended(process)
        assert code == 0, said
    assert await found(run) is None
    assert [name.version for name in arena.segments(record.run_id)] == [version], "the living trainer's head is kept"
    (sealed,) = [event for event in events(record) if event["event"] == "sealed"]
    assert (sealed["version"], sealed["check"], sealed["nbytes"]) == (str(version), "verified", LAYOUT.nbytes)


async def test_a_full_disk_ends_no_weight_service(
    run: Run, record: RunRecord, redis_url: str, arena: Arena, publisher: Publisher, wait_until: WaitUntil
) -> None:
    """A limit on the size of the service's files stands in for the disk."""

    async def sees(version: PolicyVersion, *, troubles: int) -> None:
        assert await publisher.publish(version, TENSORS)

        async def told() -> bool:
            peer = await found(run)
            return await checked(run, version) == "verified" and peer is not None and len(said(peer)) == troubles

        await wait_until(told, f"version {version} is verified, and the service has {troubles} troubles")

    def said(peer: Peer) -> list[dict[str, Any]]:
        troubles: list[dict[str, Any]] = peer.state["troubles"]
        return troubles

    with service(redis_url, record.run_id, arena) as process:
        await sees(PolicyVersion(1, 0), troubles=0)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
        for step in (1, 2):
            await sees(PolicyVersion(1, step), troubles=1)
        peer = await found(run)
        assert peer is not None
        assert said(peer)[0]["reason"].endswith(
            "jsonl cannot be written: File too large; weights are served without it"
        )
        async with aiohttp.ClientSession() as session, session.get(peer.state["metrics_url"]) as answer:
            assert "headrace_journal_lines_lost_total" in await answer.text()
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        await sees(PolicyVersion(1, 3), troubles=0)
        process.send_signal(signal.SIGTERM)
        code, stderr = await ended(process)
    assert code == 0, stderr
    assert stderr.count("cannot be written: File too large; weights are served without it") == 1
    sealed = [event["version"] for event in events(record) if event["event"] == "sealed"]
    assert sealed == ["1.0", "1.3"]


async def test_damaged_version_is_told(
    run: Run, record: RunRecord, redis_url: str, arena: Arena, publisher: Publisher, wait_until: WaitUntil
) -> None:
    assert await publisher.publish(PolicyVersion(1, 0), TENSORS)
    await publisher.sealed()
    (name,) = arena.segments(record.run_id)
    flip(arena.folder / str(name), 3)
    with service(redis_url, record.run_id, arena):

        async def damaged() -> bool:
            return await checked(run, PolicyVersion(1, 0)) == "damaged"

        await wait_until(damaged, "the damage is told")


async def test_freed_versions_lose_their_manifests(
    run: Run, record: RunRecord, redis_url: str, arena: Arena, publisher: Publisher, wait_until: WaitUntil
) -> None:
    """A reader died with its lease; once that lapses nobody but the service frees what it read."""
    await run.lease(PolicyVersion(1, 0), "dead reader", 2.0)
    with service(redis_url, record.run_id, arena):
        for step in (0, 1):
            assert await publisher.publish(PolicyVersion(1, step), TENSORS)
        await publisher.sealed()
        assert len(arena.segments(record.run_id)) == 2
        await wait_until(
            lambda: len(arena.segments(record.run_id)) == 1, "the version is freed once the lease has lapsed"
        )

        async def forgotten() -> bool:
            return await run.manifest(PolicyVersion(1, 0)) is None

        await wait_until(forgotten, "its manifest is dropped")
        assert await run.manifest(PolicyVersion(1, 1)) is not None
    assert [event["event"] for event in events(record)].count("freed") == 1


@pytest.mark.parametrize("end", ["order", "status"])
async def test_service_ends_with_its_run_and_takes_the_segments_along(
    run: Run,
    record: RunRecord,
    redis_url: str,
    arena: Arena,
    publisher: Publisher,
    wait_until: WaitUntil,
    end: str,
) -> None:
    assert await publisher.publish(PolicyVersion(1, 0), TENSORS)
    with service(redis_url, record.run_id, arena) as process:

        async def there() -> bool:
            return await found(run) is not None

        await wait_until(there, "the service has said hello")
        await run.set_status("finished", "all steps are done")
        if end == "order":
            await run.order(Order("", "end", "", 0, "all steps are done"))
        await publisher.close()
        code, said = await ended(process)
        assert code == 0, said
    assert list(arena.folder.iterdir()) == []


async def test_what_is_pinned_outlives_its_trainer_and_the_service(
    run: Run, record: RunRecord, redis_url: str, arena: Arena, publisher: Publisher, wait_until: WaitUntil
) -> None:
    for step in (0, 1):
        assert await publisher.publish(PolicyVersion(1, step), TENSORS)
        await publisher.sealed()
        await run.pin(PolicyVersion(1, step))
    for name in arena.segments(record.run_id):
        (arena.folder / str(name)).rename(arena.folder / str(replace(name, owner=replace(name.owner, pid=1))))
    with service(redis_url, record.run_id, arena) as process:

        async def seen() -> bool:
            return await checked(run, PolicyVersion(1, 1)) not in (None, "pending")

        await wait_until(seen, "the service has looked at the head")
        await run.unpin(PolicyVersion(1, 0))
        await wait_until(lambda: len(arena.segments(record.run_id)) == 1, "what is not pinned any more is freed")
        process.send_signal(signal.SIGTERM)
        code, said = await ended(process)
        assert code == 0, said
    assert [name.version.step for name in arena.segments(record.run_id)] == [1]


@pytest.mark.parametrize("reader", ["", "producer", "export"])
async def test_what_was_brought_from_another_host_goes_with_the_service_that_brought_it(
    run: Run,
    record: RunRecord,
    redis_url: str,
    arena: Arena,
    publisher: Publisher,
    tmp_path: Path,
    wait_until: WaitUntil,
    reader: str,
) -> None:
    """Of a run that goes on, though others of its host live; who reads it is waited for."""
    (tmp_path / "other").mkdir()
    there, version = Arena(tmp_path / "other", run_folder=tmp_path / "run"), PolicyVersion(1, 0)
    with service(redis_url, record.run_id, arena), service(redis_url, record.run_id, there, HEADRACE_HOST="b") as other:
        assert await publisher.publish(version, TENSORS)

        async def on_host_b() -> list[Peer]:
            return [peer for peer in await run.peers() if peer.role == "weights" and peer.host == "b" and peer.alive]

        async def brought() -> bool:
            sees = any(peer.state["head"] == str(version) for peer in await on_host_b())
            return sees and bool(there.segments(record.run_id)) and not read(await run.leased())

        await wait_until(brought, "the version is on the other host")
        await run.heartbeat(Peer("producer-a", "producer", "a", 1, True, {}), 60)
        await run.heartbeat(Peer("producer-b", "producer", "b", 1, True, {}), 60)
        await run.lease(version, "producer-a", 60)
        holder = {"producer": "producer-b", "export": "export-b-7"}.get(reader, "")
        if holder:
            await run.lease(version, holder, 60)
        other.send_signal(signal.SIGTERM)
        if holder:

            async def said_goodbye() -> bool:
                return not await on_host_b()

            await wait_until(said_goodbye, "it leaves")
            assert [name.version for name in there.segments(record.run_id)] == [version], "it is still read"
            await run.release(version, holder)
        code, said = await ended(other)
        assert code == 0, said
    assert list(there.folder.iterdir()) == []
    assert [name.version for name in arena.segments(record.run_id)] == [version], "the trainer has it"


async def test_two_runs_of_one_id_leave_each_other_alone(
    run: Run,
    record: RunRecord,
    redis_url: str,
    redis_process: Callable[..., RedisProcess],
    arena: Arena,
    publisher: Publisher,
    tmp_path: Path,
    wait_until: WaitUntil,
) -> None:
    """On one host, each with a Redis of its own; the versions have the same names too."""
    other_url, theirs = redis_process().url, Arena(arena.folder, run_folder=tmp_path / "other")
    runs = connect_runs(other_url)
    await runs.create(replace(record, folder=str(tmp_path / "other")))
    other = connect_run(other_url, record.run_id)
    second = Publisher(other, await other.take_fence(0), LAYOUT, record.run_id, 3, arena=theirs)
    first, later = PolicyVersion(1, 0), PolicyVersion(1, 5)
    assert await second.publish(first, TENSORS)
    with service(redis_url, record.run_id, arena), service(other_url, record.run_id, theirs):
        for step in range(6):
            assert await publisher.publish(PolicyVersion(1, step), {**TENSORS, "w": torch.full((64, 8), float(step))})
        for port, head in ((run, later), (other, first)):

            async def verified(port: Run = port, head: PolicyVersion = head) -> bool:
                return await checked(port, head) == "verified"

            await wait_until(verified, "the head is verified")

        async def freed() -> bool:
            return [name.version for name in arena.segments(record.run_id)] == [later]

        await wait_until(freed, "what the run needs no more is freed")
        assert [name.version for name in theirs.segments(record.run_id)] == [first], "the other one needs it"
    await second.close()
    await other.close()
    await runs.close()


async def test_service_of_a_deleted_run_ends_with_a_sentence(
    run: Run, runs: Runs, record: RunRecord, redis_url: str, arena: Arena, wait_until: WaitUntil
) -> None:
    with service(redis_url, record.run_id, arena) as process:

        async def there() -> bool:
            return await found(run) is not None

        await wait_until(there, "the service has said hello")
        await runs.delete(record.run_id)
        code, said = await ended(process)
    assert code == 3
    name = f"weights-{socket.gethostname()}-{process.pid}"
    assert said.splitlines()[-1].startswith(f"{name}: run {record.run_id!r} was deleted")


@pytest.mark.parametrize(
    ("environ", "code", "sentence"),
    [
        ({"HEADRACE_REDIS_URL": ""}, 2, "weights: HEADRACE_REDIS_URL is not set"),
        ({"HEADRACE_RUN": ""}, 2, "weights: no run is named"),
        ({"HEADRACE_METRICS_PORT": "70000"}, 2, "weights: metrics port '70000' is not a number from 0 to 65535"),
        ({"HEADRACE_RUN": "unknown"}, 3, "there is no run 'unknown'"),
        ({"HEADRACE_SHM_DIR": "/nowhere"}, 5, "HEADRACE_SHM_DIR = '/nowhere' cannot be written"),
    ],
    ids=["no url", "no run", "port", "unknown run", "no folder"],
)
async def test_bad_input_is_one_sentence(
    run: Run, record: RunRecord, redis_url: str, arena: Arena, environ: dict[str, str], code: int, sentence: str
) -> None:
    with service(redis_url, record.run_id, arena, **environ) as process:
        found_code, said = await ended(process)
    assert found_code == code
    assert sentence in said.splitlines()[-1]
    assert "secret" not in said
    assert "Traceback" not in said


async def test_service_outlives_a_restart_of_redis_and_goes_on(
    redis_process: Callable[..., Any], record: RunRecord, arena: Arena, wait_until: WaitUntil
) -> None:
    from broker.connect import connect_runs

    server = redis_process()
    runs = connect_runs(server.url)
    await runs.create(replace(record, folder=""))
    run = connect_run(server.url, record.run_id)
    publisher = Publisher(run, await run.take_fence(0), LAYOUT, record.run_id, 3, arena=arena)
    with service(server.url, record.run_id, arena):
        assert await publisher.publish(PolicyVersion(1, 0), TENSORS)

        async def seen(step: int) -> bool:
            return await checked(run, PolicyVersion(1, step)) == "verified"

        await wait_until(lambda: seen(0), "the first version is verified")
        server.kill()
        server.start()
        assert await publisher.publish(PolicyVersion(1, 1), TENSORS)
        await wait_until(lambda: seen(1), "the second version is verified")
    await publisher.close()
    await run.close()
    await runs.close()
