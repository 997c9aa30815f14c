"""Real processes killed or frozen at each step: no torn version is committed, the others go on, no segment is left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import pytest

from broker.api import Fence, RunRecord
from broker.connect import Run, connect_run, connect_runs
from headrace.config import BrokerConfig, Config, WeightsConfig
from headrace.version import PolicyVersion
from tests.servers import RedisProcess
from tests.weight_processes import PRODUCER_STEPS, TRAINER_STEPS, child
from tests.weights import LAYOUT, Engine, Host, flat, gated, receiving, tensors, training
from weightsync.arena import Arena

LEASE_S = 10.0
RECOVERY_S = 2 * LEASE_S
SERVICE_LEASE_S = 1.0
BROKER = BrokerConfig(stream_block_ms=100, connect_timeout_s=20.0)
KILL_OR_STOP = pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=lambda how: how.name)
WaitUntil = Callable[..., Awaitable[None]]


@pytest.fixture
def record(run_id: str) -> RunRecord:
    config = Config(broker=BROKER, weights=WeightsConfig(lease_s=SERVICE_LEASE_S)).model_dump(mode="json")
    return RunRecord(run_id, 1, config, {}, vocab_size=10)


@pytest.fixture
def host(run: Run, run_id: str, tmp_path: Path) -> Host:
    return Host(run, run_id, Arena(tmp_path))


@contextmanager
def service(host: Host, url: str) -> Iterator[subprocess.Popen[bytes]]:
    """`python -m weightsync`; killed at the end if it still runs."""
    known = {"HEADRACE_REDIS_URL": url, "HEADRACE_RUN": host.run_id, "HEADRACE_SHM_DIR": str(host.arena.folder)}
    process = subprocess.Popen([sys.executable, "-m", "weightsync"], env={**os.environ, **known})
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def newest_checked(host: Host) -> set[tuple[str, str]]:
    """Head and finding of each weight service that lives."""
    peers = [peer for peer in await host.port.peers() if peer.role == "weights" and peer.alive]
    return {(str(peer.state["head"]), str(peer.state["check"])) for peer in peers}


async def nothing_leased(host: Host) -> bool:
    return await host.port.leased() == {}


@KILL_OR_STOP
@pytest.mark.parametrize("at", TRAINER_STEPS)
async def test_trainer_is_replaced_wherever_it_stops(
    host: Host, redis_url: str, wait_until: WaitUntil, at: str, how: signal.Signals
) -> None:
    early, late = Engine(), Engine()
    usable = PolicyVersion(1, 1 if at == "head moved" else 0)
    async with child("trainer", host, redis_url, at) as old, AsyncExitStack() as stack:
        await stack.enter_async_context(receiving(host, early, holder="early", lease_s=LEASE_S))
        old.meets(how)
        await wait_until(lambda: early.version == usable, "the head is committed")
        # Who joins now finds it, too, and beside it a version that comes no further.
        await stack.enter_async_context(receiving(host, late, holder="late", lease_s=LEASE_S))
        await wait_until(lambda: late.version == usable, "the head is committed by who joins late")
        async with training(host.port, host.run_id, host.arena, alone=False) as new:
            assert await new.publish(5), "what the old trainer left takes no room"
            newest = new.version(5)
            await wait_until(lambda: early.version == late.version == newest, "all are on the new one", RECOVERY_S)
            assert new.live == [5]
            if how == signal.SIGSTOP:
                old.goes_on()
                assert await old.says() == "fenced"
                assert await host.port.head() == newest
                assert new.live == [5]
            assert await new.publish(6)
            await wait_until(lambda: early.version == late.version == new.version(6), "and on the next one")
    assert {*early.history, *late.history} == {usable, newest, new.version(6)}
    assert host.arena.segments() == []


@KILL_OR_STOP
@pytest.mark.parametrize("at", PRODUCER_STEPS)
async def test_reader_holds_up_nobody_wherever_it_stops(
    host: Host,
    redis_url: str,
    monkeypatch: pytest.MonkeyPatch,
    wait_until: WaitUntil,
    at: str,
    how: signal.Signals,
) -> None:
    may_be_sealed = asyncio.Event()
    publish_head = host.port.publish_head

    async def held(fence: Fence, version: PolicyVersion, manifest: bytes) -> None:
        await may_be_sealed.wait()
        await publish_head(fence, version, manifest)

    monkeypatch.setattr(host.port, "publish_head", held)
    async with training(host.port, host.run_id, host.arena, max_live=3) as trainer:
        assert await trainer.publisher.publish(trainer.version(0), tensors(0))
        if at == "committing":
            may_be_sealed.set()
        async with child("producer", host, redis_url, at) as reader:
            reader.meets(how)
            may_be_sealed.set()
            engine = Engine()
            async with receiving(host, engine, lease_s=LEASE_S):
                for step in (0, 1, 2, 3):
                    assert step == 0 or await trainer.publish(step), "no version is skipped for one reader"
                    newest = trainer.version(step)
                    await wait_until(lambda newest=newest: engine.version == newest, f"step {step} is committed")
            await wait_until(lambda: nothing_leased(host), "the reader's lease has lapsed")
            assert await trainer.publish(4)
            assert trainer.live == [4]
            if how == signal.SIGSTOP:
                reader.goes_on()
                said = ""
                while not said.startswith(f"{trainer.version(4)} "):
                    said = await reader.says()
                    assert said.endswith("whole")
                reader.meets(signal.SIGKILL)
                await wait_until(lambda: nothing_leased(host), "the lease of the reader that was killed has lapsed")


@KILL_OR_STOP
async def test_service_holds_up_nobody_and_catches_up(
    host: Host, redis_url: str, wait_until: WaitUntil, how: signal.Signals
) -> None:
    engine = Engine()
    async with training(host.port, host.run_id, host.arena) as trainer, receiving(host, engine):
        with service(host, redis_url) as first:
            await wait_until(lambda: newest_checked(host), "the service has said hello")
            first.send_signal(how)
            for step in range(3):
                assert await trainer.publish(step)
                await wait_until(lambda step=step: engine.version == trainer.version(step), f"{step} is committed")
            checked = {(str(trainer.version(2)), "verified")}

            async def caught_up() -> bool:
                return await newest_checked(host) == checked

            if how == signal.SIGSTOP:
                first.send_signal(signal.SIGCONT)
                await wait_until(caught_up, "it has checked the newest version")
            else:
                with service(host, redis_url):
                    await wait_until(caught_up, "the next service has checked the newest version", 60)


@pytest.mark.parametrize("goes_on", [True, False], ids=["replaced", "for good"])
async def test_service_frees_what_a_killed_trainer_left(
    host: Host, redis_url: str, wait_until: WaitUntil, goes_on: bool
) -> None:
    with service(host, redis_url) as process:
        async with child("trainer", host, redis_url, "copying") as old:
            assert host.live == [0, 1]
            old.meets(signal.SIGKILL)
            await wait_until(lambda: host.live == [0], "only the sealed head is left", 60)
        if goes_on:
            async with training(host.port, host.run_id, host.arena, alone=False) as trainer:
                assert await trainer.publish(5)
                await wait_until(lambda: host.live == [5], "the dead trainer's head is freed")
                await host.port.set_status("finished", "")
        else:
            process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 60) == 0
    assert host.arena.segments() == []


@pytest.mark.parametrize("loss", ["nothing", "the announcement", "all"])
async def test_version_is_sealed_and_found_though_redis_was_lost_meanwhile(
    redis_process: Callable[..., RedisProcess], record: RunRecord, tmp_path: Path, wait_until: WaitUntil, loss: str
) -> None:
    """What Redis forgot of the run itself, the trainer's port puts back."""
    server = redis_process("--appendfsync", "always", "--auto-aof-rewrite-percentage", "0")
    early, late = Engine(), Engine()
    async with AsyncExitStack() as stack:
        runs = connect_runs(server.url, BROKER)
        stack.push_async_callback(runs.close)
        await runs.create(record)
        ports = [connect_run(server.url, record.run_id, BROKER) for _ in range(2)]
        for port in ports:
            stack.push_async_callback(port.close)
        host = Host(ports[1], record.run_id, Arena(tmp_path))
        await host.port.record()
        trainer = await stack.enter_async_context(training(ports[0], record.run_id, host.arena))
        assert await trainer.publish(0)
        await stack.enter_async_context(receiving(host, early, holder="early", lease_s=LEASE_S))
        await wait_until(lambda: early.version == trainer.version(0), "the first version is committed")
        await wait_until(lambda: nothing_leased(host), "its lease is given back")
        size = server.append_only_file.stat().st_size
        values, gate = gated(1, "norm")
        first, begun = LAYOUT.tensors[0].nbytes, flat(tensors(1))
        publishing = asyncio.create_task(trainer.publisher.publish(trainer.version(1), values))
        await wait_until(lambda: early.back[:first].tobytes() == begun[:first], "the next version is being staged")
        await lose(server, loss, size)
        gate.open()
        assert await publishing
        await wait_until(lambda: early.version == trainer.version(1), "it is committed", RECOVERY_S)
        await lose(server, loss, size)
        # As the trainer does once its port has mended Redis.
        await trainer.port.set_step(trainer.fence, 1)
        await trainer.publisher.announce_again()
        await stack.enter_async_context(receiving(host, late, holder="late", lease_s=LEASE_S))
        await wait_until(lambda: late.version == trainer.version(1), "who joins now finds it", RECOVERY_S)


async def lose(server: RedisProcess, what: str, size: int) -> None:
    """Kill Redis and start it again, without what it wrote after its file had this size, or without anything."""
    server.kill()
    if what != "nothing":
        os.truncate(server.append_only_file, size if what == "the announcement" else 0)
    await asyncio.to_thread(server.start)
