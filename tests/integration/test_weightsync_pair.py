"""Publisher and receiver on one host, over a real broker: what is published is what is committed, or nothing is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from broker.api import Fence, Versions
from broker.connect import Run
from headrace.errors import WeightError
from headrace.version import PolicyVersion
from tests.weights import HOST, LAYOUT, LEASE_S, Engine, Trainer, flat, flip, gated, receiving, tensors, training
from weightsync.arena import Arena
from weightsync.commits import Commit
from weightsync.manifest import Layout, decode, encode
from weightsync.placement import Bytes, chunk_bounds
from weightsync.receiver import Receiver
from weightsync.transports import shm
from weightsync.transports.shm import ShmTransport

WaitUntil = Callable[..., Awaitable[None]]
FIRST_BYTES = LAYOUT.tensors[0].nbytes
"""Of the first tensor, which is whole chunks."""


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
    transport = ShmTransport(HOST, trainer.arena)
    receiver = Receiver(
        trainer.port, engine, "p", HOST, run_id=trainer.run_id, block_ms=50, transport=transport,
        on_commit=commits.append,
    )  # fmt: skip
    assert await trainer.publish(4)
    task = asyncio.create_task(receiver.run(stopping))
    await wait_until(lambda: bool(commits), "a commit is reported")
    stopping.set()
    await task
    assert commits[0].version == trainer.version(4)
    assert commits[0].nbytes == LAYOUT.nbytes
    assert commits[0].latency_s >= commits[0].fetch_s + commits[0].verify_s > 0


async def test_version_is_staged_while_it_is_made_and_committed_once_it_is_sealed(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch, wait_until: WaitUntil
) -> None:
    sealing, may_be_sealed = asyncio.Event(), asyncio.Event()
    publish_head = trainer.port.publish_head

    async def held(fence: Fence, version: PolicyVersion, manifest: bytes) -> None:
        if version.step == 1:
            sealing.set()
            await may_be_sealed.wait()
        await publish_head(fence, version, manifest)

    monkeypatch.setattr(trainer.port, "publish_head", held)
    assert await trainer.publish(0)
    values, gate = gated(1, "norm")
    publishing = asyncio.create_task(trainer.publisher.publish(trainer.version(1), values))
    await asyncio.to_thread(gate.reached.wait, 20)
    # Who joins now takes the head first.
    engine, whole = Engine(), flat(tensors(1))
    async with receiving(trainer, engine) as receiver:
        await wait_until(lambda: engine.version == trainer.version(0), "the head is committed")
        await wait_until(lambda: engine.back[:FIRST_BYTES].tobytes() == whole[:FIRST_BYTES], "what is copied is staged")
        assert not publishing.done()
        gate.open()
        assert await publishing
        await asyncio.wait_for(sealing.wait(), 20)
        await wait_until(lambda: engine.back.tobytes() == whole, "all is staged")
        # It has looked again for the seal since.
        await receiver_looks(trainer, monkeypatch)
        assert engine.history == [trainer.version(0)]
        assert await trainer.port.leased() == {trainer.version(1): ["producer-0"]}
        may_be_sealed.set()
        await wait_until(lambda: engine.version == trainer.version(1), "the sealed version is committed")
        assert receiver.stats().vanished == receiver.stats().refused == 0


async def receiver_looks(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Return once the receiver has asked twice what there is, and was answered."""
    asked = asyncio.Semaphore(0)
    wait_versions = trainer.port.wait_versions

    async def noted(seen: Versions, block_ms: int) -> Versions:
        answer = await wait_versions(seen, block_ms)
        asked.release()
        return answer

    monkeypatch.setattr(trainer.port, "wait_versions", noted)
    for _ in range(3):
        await asyncio.wait_for(asked.acquire(), 20)
    monkeypatch.setattr(trainer.port, "wait_versions", wait_versions)


@pytest.mark.parametrize("mended", [True, False], ids=["mended", "not mended"])
async def test_chunk_that_the_seal_does_not_match_is_fetched_again(
    trainer: Trainer, wait_until: WaitUntil, mended: bool
) -> None:
    values, gate = gated(0, "norm")
    publishing = asyncio.create_task(trainer.publisher.publish(trainer.version(0), values))
    await asyncio.to_thread(gate.reached.wait, 20)
    file = await trainer.file(0)
    reader = trainer.arena.open(file.name, LAYOUT)
    assert reader is not None
    await wait_until(lambda: reader.ready() == 8, "the chunks of the first tensor are digested")
    reader.close()
    flip(file, 3 * LAYOUT.chunk_bytes + 5)
    wrong = file.read_bytes()[:FIRST_BYTES]
    engine = Engine()
    async with receiving(trainer, engine) as receiver:
        await wait_until(lambda: engine.back[:FIRST_BYTES].tobytes() == wrong, "the damaged chunk is staged")
        if mended:
            flip(file, 3 * LAYOUT.chunk_bytes + 5)
        gate.open()
        assert await publishing
        if mended:
            await wait_until(lambda: engine.version == trainer.version(0), "the version is committed")
            assert receiver.stats().damaged == 0
        else:
            await wait_until(lambda: receiver.stats().damaged >= 2, "the version is refused twice")
            assert engine.history == []
        assert await trainer.publish(1)
        await wait_until(lambda: engine.version == trainer.version(1), "the next version is committed")


async def test_version_that_is_sealed_as_another_one_is_refused(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch, wait_until: WaitUntil
) -> None:
    values, gate = gated(0, "head")
    publish_head = trainer.port.publish_head

    async def another(fence: Fence, version: PolicyVersion, manifest: bytes) -> None:
        wrong = decode(manifest)
        wrong = replace(wrong, parts=(replace(wrong.parts[0], segment="another"),))
        await publish_head(fence, version, encode(wrong))

    monkeypatch.setattr(trainer.port, "publish_head", another)
    engine = Engine()
    async with receiving(trainer, engine) as receiver:
        publishing = asyncio.create_task(trainer.publisher.publish(trainer.version(0), values))
        await wait_until(engine.back[:FIRST_BYTES].any, "what is copied is staged")
        gate.open()
        assert await publishing
        await wait_until(lambda: receiver.stats().refused == 1, "it is refused")
        assert engine.history == []


async def test_no_flipped_bit_of_any_chunk_is_committed(trainer: Trainer, wait_until: WaitUntil) -> None:
    for step, (start, end) in enumerate(chunk_bounds(LAYOUT, 0)):
        assert await trainer.publish(step)
        flip(await trainer.file(step), (start + end) // 2 - 1)
        engine = Engine()
        async with receiving(trainer, engine) as receiver:
            await wait_until(lambda: receiver.stats().damaged >= 1, "the damaged version is refused")
            assert engine.history == []
    assert await trainer.publish(99)
    async with receiving(trainer, engine):
        await wait_until(lambda: engine.version == trainer.version(99), "the next version is committed")


async def test_flipped_bit_of_the_trailer_changes_no_committed_bit_and_the_next_version_is_taken(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch, wait_until: WaitUntil
) -> None:
    monkeypatch.setattr(shm, "WAIT_S", 0.01)
    trailer = 4096
    for number, at in enumerate([*range(trailer, trailer + 32), trailer + 32 + 5]):
        assert await trainer.publish(2 * number)
        flip(await trainer.file(2 * number), at)
        engine = Engine()
        async with receiving(trainer, engine, round_chunks=2):
            assert await trainer.publish(2 * number + 1)
            newest = trainer.version(2 * number + 1)
            await wait_until(lambda: engine.version == newest, f"the next one is committed (byte {at})")  # noqa: B023


@pytest.mark.parametrize(
    "change",
    [{"run_id": "another-run"}, {"version": PolicyVersion(99, 99)}],
    ids=lambda change: next(iter(change)),
)
async def test_manifest_that_is_not_this_versions_is_refused(
    trainer: Trainer, wait_until: WaitUntil, change: dict[str, object]
) -> None:
    assert await trainer.publish(0)
    wrong = replace(await trainer.manifest(0), **{"version": trainer.version(1), **change})
    await refused_until_the_next(trainer, wait_until, encode(wrong))


async def test_damaged_manifest_is_refused(trainer: Trainer, wait_until: WaitUntil) -> None:
    assert await trainer.publish(0)
    wrong = bytearray(encode(replace(await trainer.manifest(0), version=trainer.version(1))))
    wrong[len(wrong) // 2] ^= 64
    await refused_until_the_next(trainer, wait_until, bytes(wrong))


async def refused_until_the_next(trainer: Trainer, wait_until: WaitUntil, wrong: bytes) -> None:
    engine = Engine()
    await trainer.port.publish_head(trainer.fence, trainer.version(1), wrong)
    async with receiving(trainer, engine) as receiver:
        await wait_until(lambda: receiver.stats().refused >= 1, "the manifest is refused")
        assert await trainer.publish(2)
        await wait_until(lambda: engine.version == trainer.version(2), "the next version is committed")
    assert engine.history == [trainer.version(2)]


async def test_announcement_that_is_repeated_after_the_seal_commits_nothing_torn(
    trainer: Trainer, wait_until: WaitUntil
) -> None:
    engine = Engine()
    assert await trainer.publish(0)
    sealed = await trainer.manifest(0)
    begun = replace(sealed, sealed=False, parts=tuple(replace(part, digests=()) for part in sealed.parts))
    await trainer.port.announce(trainer.fence, trainer.version(0), encode(begun))
    async with receiving(trainer, engine):
        for step in (1, 2):
            assert await trainer.publish(step)
            # An old announcement and an old head arrive once more.
            await trainer.port.announce(trainer.fence, trainer.version(0), encode(begun))
            await trainer.port.publish_head(trainer.fence, trainer.version(0), encode(sealed))
            await wait_until(lambda step=step: engine.version == trainer.version(step), f"step {step} is committed")


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
    async with receiving(trainer, engine, news=free, round_chunks=3):
        await wait_until(lambda: engine.version == trainer.version(0), "the version is committed")


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
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch, wait_until: WaitUntil
) -> None:
    waits: list[tuple[Versions, int]] = []
    wait_versions = trainer.port.wait_versions

    async def noted(seen: Versions, block_ms: int) -> Versions:
        waits.append((seen, block_ms))
        return await wait_versions(seen, block_ms)

    assert await trainer.publish(0)
    for name in trainer.arena.segments():
        trainer.arena.remove(name)
    monkeypatch.setattr(trainer.port, "wait_versions", noted)
    stopping = asyncio.Event()
    transport = ShmTransport(HOST, trainer.arena)
    receiver = Receiver(trainer.port, Engine(), "p", HOST, run_id=trainer.run_id, block_ms=300, transport=transport)
    task = asyncio.create_task(receiver.run(stopping))
    await wait_until(lambda: len(waits) >= 6, "five failures")
    stopping.set()
    await task
    first, *later = waits
    assert first == (Versions(), 300)
    assert {seen for seen, _ in later} == {Versions(trainer.version(0), trainer.version(0))}
    assert [block_ms for _, block_ms in later[:5]] == [51, 101, 201, 300, 300]


async def test_staging_gives_way_once_to_a_newer_version_and_then_finishes(
    trainer: Trainer, wait_until: WaitUntil
) -> None:
    """The trainer publishes after every round: without the rule no version would ever be finished."""
    engine, steps = Engine(), iter(range(1, 100))

    async def publish_next() -> None:
        await trainer.publish(next(steps))

    assert await trainer.publish(0)
    async with receiving(trainer, engine, news=publish_next, round_chunks=1) as receiver:
        await wait_until(lambda: len(engine.history) >= 2, "two versions are committed")
        assert receiver.stats().skipped >= 1
    assert trainer.version(0) not in engine.history


async def test_layout_that_does_not_fit_the_engine_ends_the_receiver(trainer: Trainer) -> None:
    class Unfit(Engine):
        def back_buffer(self, layout: Layout) -> Bytes:
            raise WeightError("the layout does not fit the engine's model")

    assert await trainer.publish(0)
    with pytest.raises(WeightError, match="does not fit the engine"):
        async with receiving(trainer, Unfit()):
            await asyncio.sleep(0)


async def test_producer_on_another_host_is_told_so(trainer: Trainer) -> None:
    assert await trainer.publish(0)
    transport = ShmTransport("elsewhere", trainer.arena)
    receiver = Receiver(
        trainer.port, Engine(), "p", "elsewhere", run_id=trainer.run_id, block_ms=50, transport=transport
    )
    with pytest.raises(WeightError, match=f"lies on host '{HOST}', this is 'elsewhere'"):
        await asyncio.wait_for(receiver.run(asyncio.Event()), 20)
