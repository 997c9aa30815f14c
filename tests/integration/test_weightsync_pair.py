"""Publisher and receiver on one host, over a real broker: what is published is what is committed, or nothing is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from broker.connect import Run
from headrace.errors import WeightError
from headrace.version import PolicyVersion
from tests.weights import HOST, LAYOUT, LEASE_S, Engine, Trainer, flat, receiving, tensors, training
from weightsync.arena import Arena, Bytes
from weightsync.manifest import Layout, encode
from weightsync.receiver import Commit, Receiver
from weightsync.transports.shm import ShmTransport

WaitUntil = Callable[..., Awaitable[None]]


@pytest.fixture
async def trainer(run: Run, run_id: str, tmp_path: Path) -> AsyncIterator[Trainer]:
    async with training(run, run_id, Arena(tmp_path)) as trainer:
        yield trainer


async def test_engine_gets_the_published_bits_and_then_the_next_version(
    trainer: Trainer, wait_until: WaitUntil
) -> None:
    engine = Engine()
    async with receiving(trainer, engine) as receiver:
        assert not receiver.first_version.is_set()
        for step in (0, 1, 2):
            assert await trainer.publish(step)
            await wait_until(lambda step=step: engine.version == trainer.version(step), f"step {step} is committed")
            assert engine.front.tobytes() == flat(tensors(step))
        await asyncio.wait_for(receiver.ready(), 1)
        stats = receiver.stats()
        assert (stats.commits, stats.damaged, stats.staged_bytes) == (3, 0, 3 * LAYOUT.nbytes)
        assert min(stats.fetch_s, stats.verify_s, stats.last_latency_s) > 0
    assert trainer.publisher.stats().published == 3


async def test_each_commit_is_reported(trainer: Trainer, wait_until: WaitUntil) -> None:
    commits: list[Commit] = []
    engine, stopping = Engine(), asyncio.Event()
    run_id = (await trainer.port.record()).run_id
    transport = ShmTransport(HOST, trainer.arena)
    receiver = Receiver(
        trainer.port, engine, "p", HOST, run_id=run_id, block_ms=50, transport=transport, on_commit=commits.append
    )
    task = asyncio.create_task(receiver.run(stopping))
    assert await trainer.publish(4)
    await wait_until(lambda: bool(commits), "a commit is reported")
    stopping.set()
    await task
    assert commits[0].version == trainer.version(4)
    assert commits[0].nbytes == LAYOUT.nbytes
    assert commits[0].latency_s >= commits[0].fetch_s + commits[0].verify_s > 0


@pytest.mark.parametrize("spec", LAYOUT.tensors, ids=lambda spec: spec.name)
async def test_flipped_byte_is_never_committed_and_the_next_version_is(
    trainer: Trainer, wait_until: WaitUntil, spec: object
) -> None:
    engine = Engine()
    assert await trainer.publish(0)
    (file,) = trainer.arena.folder.iterdir()
    with file.open("r+b") as stream:
        stream.seek(spec.end - 1)  # type: ignore[attr-defined]
        byte = stream.read(1)[0]
        stream.seek(spec.end - 1)  # type: ignore[attr-defined]
        stream.write(bytes([byte ^ 1]))
    async with receiving(trainer, engine) as receiver:
        await wait_until(lambda: receiver.stats().damaged >= 2, "the damaged version is refused twice")
        assert engine.history == []
        assert await trainer.publish(1)
        await wait_until(lambda: engine.version == trainer.version(1), "the next version is committed")
        assert engine.front.tobytes() == flat(tensors(1))
    assert engine.history == [trainer.version(1)]


@pytest.mark.parametrize(
    "change",
    [
        {"sealed": False},
        {"run_id": "another-run"},
        {"version": PolicyVersion(99, 99)},
    ],
    ids=lambda change: next(iter(change)),
)
async def test_manifest_that_is_not_sealed_or_not_this_versions_is_refused(
    trainer: Trainer, wait_until: WaitUntil, change: dict[str, object]
) -> None:
    engine = Engine()
    assert await trainer.publish(0)
    wrong = replace(await trainer.manifest(0), **{"version": trainer.version(1), **change})
    await trainer.port.publish_head(trainer.fence, trainer.version(1), encode(wrong))
    async with receiving(trainer, engine) as receiver:
        await wait_until(lambda: receiver.stats().refused >= 1, "the manifest is refused")
        assert await trainer.publish(2)
        await wait_until(lambda: engine.version == trainer.version(2), "the next version is committed")
    assert engine.history == [trainer.version(2)]


async def test_damaged_manifest_is_refused(trainer: Trainer, wait_until: WaitUntil) -> None:
    engine = Engine()
    assert await trainer.publish(0)
    data = bytearray(encode(replace(await trainer.manifest(0), version=trainer.version(1))))
    data[len(data) // 2] ^= 64
    await trainer.port.publish_head(trainer.fence, trainer.version(1), bytes(data))
    async with receiving(trainer, engine) as receiver:
        await wait_until(lambda: receiver.stats().refused >= 1, "the manifest is refused")
    assert engine.history == []


async def test_vanished_segment_is_counted_and_the_next_version_taken(trainer: Trainer, wait_until: WaitUntil) -> None:
    engine = Engine()
    assert await trainer.publish(0)
    for file in trainer.arena.folder.iterdir():
        file.unlink()
    async with receiving(trainer, engine) as receiver:
        await wait_until(lambda: receiver.stats().vanished >= 2, "the segment is missed twice")
        assert await trainer.publish(1)
        await wait_until(lambda: engine.version == trainer.version(1), "the next version is committed")


async def test_version_freed_while_it_is_staged_is_still_whole(trainer: Trainer, wait_until: WaitUntil) -> None:
    engine = Engine()

    async def free() -> None:
        for name in trainer.arena.segments():
            trainer.arena.remove(name)

    assert await trainer.publish(0)
    async with receiving(trainer, engine, news=free, round_bytes=100):
        await wait_until(lambda: engine.version == trainer.version(0), "the version is committed")
    assert engine.front.tobytes() == flat(tensors(0))


async def test_version_is_leased_as_long_as_it_is_read(trainer: Trainer, wait_until: WaitUntil) -> None:
    engine, held = Engine(), []

    async def outlast_the_lease() -> None:
        held.append(await trainer.port.leased())
        until = time.monotonic() + 2.5 * LEASE_S
        await wait_until(lambda: time.monotonic() > until, "the first lease would have lapsed")
        held.append(await trainer.port.leased())

    assert await trainer.publish(0)
    async with receiving(trainer, engine, news=outlast_the_lease):
        await wait_until(lambda: engine.version == trainer.version(0), "the version is committed")
    assert held == [{trainer.version(0): ["producer-0"]}] * 2


async def test_failing_version_is_tried_ever_more_slowly(
    trainer: Trainer, run_id: str, monkeypatch: pytest.MonkeyPatch, wait_until: WaitUntil
) -> None:
    waits: list[tuple[PolicyVersion | None, int]] = []
    wait_head = trainer.port.wait_head

    async def noted(after: PolicyVersion | None, block_ms: int) -> PolicyVersion | None:
        waits.append((after, block_ms))
        return await wait_head(after, block_ms)

    assert await trainer.publish(0)
    for name in trainer.arena.segments():
        trainer.arena.remove(name)
    monkeypatch.setattr(trainer.port, "wait_head", noted)
    stopping = asyncio.Event()
    transport = ShmTransport(HOST, trainer.arena)
    receiver = Receiver(trainer.port, Engine(), "p", HOST, run_id=run_id, block_ms=300, transport=transport)
    task = asyncio.create_task(receiver.run(stopping))
    await wait_until(lambda: len(waits) >= 6, "five failures")
    stopping.set()
    await task
    first, *later = waits
    assert first == (None, 300)
    assert {after for after, _ in later} == {trainer.version(0)}
    assert [block_ms for _, block_ms in later[:5]] == [51, 101, 201, 300, 300]


async def test_staging_gives_way_once_to_a_newer_version_and_then_finishes(
    trainer: Trainer, wait_until: WaitUntil
) -> None:
    """The trainer publishes after every round: without the rule no version would ever be finished."""
    engine, steps = Engine(), iter(range(1, 100))

    async def publish_next() -> None:
        await trainer.publish(next(steps))

    assert await trainer.publish(0)
    async with receiving(trainer, engine, news=publish_next, round_bytes=100) as receiver:
        await wait_until(lambda: len(engine.history) >= 2, "two versions are committed")
        assert receiver.stats().skipped >= 1
    assert engine.front.tobytes() == flat(tensors(engine.history[-1].step))
    assert trainer.version(0) not in engine.history


async def test_layout_that_does_not_fit_the_engine_ends_the_receiver(trainer: Trainer) -> None:
    class Unfit(Engine):
        def back_buffer(self, layout: Layout) -> Bytes:
            raise WeightError("the layout does not fit the engine's model")

    assert await trainer.publish(0)
    with pytest.raises(WeightError, match="does not fit the engine"):
        async with receiving(trainer, Unfit()):
            await asyncio.sleep(0)


async def test_producer_on_another_host_is_told_so(trainer: Trainer, run_id: str) -> None:
    assert await trainer.publish(0)
    transport = ShmTransport("elsewhere", trainer.arena)
    receiver = Receiver(trainer.port, Engine(), "p", "elsewhere", run_id=run_id, block_ms=50, transport=transport)
    with pytest.raises(WeightError, match="lies on host 'this-host', this is 'elsewhere'"):
        await asyncio.wait_for(receiver.run(asyncio.Event()), 20)
