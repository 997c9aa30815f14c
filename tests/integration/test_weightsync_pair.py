"""Publisher and receiver on one host, over a real broker: what is published is what is committed, or nothing is."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from broker.api import Fence
from broker.connect import Run
from headrace.errors import Fenced, WeightError
from headrace.version import PolicyVersion
from weightsync.arena import Arena, Bytes
from weightsync.digests import Pace
from weightsync.manifest import Layout, Manifest, decode, encode
from weightsync.publisher import Publisher
from weightsync.receiver import Commit, Receiver
from weightsync.transports.api import Range, Source, Unavailable
from weightsync.transports.shm import ShmTransport

torch.set_num_threads(1)
HOST = "this-host"
LEASE_S = 0.6
LAYOUT = Layout.of([("embed", "bfloat16", (32, 8)), ("norm", "float32", (7,)), ("head", "float16", (3, 5))])
WaitUntil = Callable[..., Awaitable[None]]


class Engine:
    """Two buffers and a version: what the receiver needs of an engine."""

    def __init__(self) -> None:
        self.version: PolicyVersion | None = None
        self.front: Bytes = np.zeros(0, np.uint8)
        self.history: list[PolicyVersion] = []
        self._back: Bytes | None = None

    def back_buffer(self, layout: Layout) -> Bytes:
        if self._back is None:
            self._back = np.zeros(layout.nbytes, np.uint8)
        return self._back

    async def commit(self, version: PolicyVersion) -> float:
        assert self._back is not None
        self.front, self._back = self._back, None
        self.version = version
        self.history.append(version)
        return 0.0


def tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {spec.name: torch.randn(spec.shape, generator=generator) for spec in LAYOUT.tensors}


def flat(values: Mapping[str, torch.Tensor]) -> bytes:
    """The bytes that the layout should hold, made without the code under test."""
    dtypes = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    out = np.zeros(LAYOUT.nbytes, np.uint8)
    for spec in LAYOUT.tensors:
        data = values[spec.name].to(dtypes[spec.dtype]).contiguous().flatten().view(torch.uint8).numpy()
        out[spec.offset : spec.offset + spec.nbytes] = data
    return out.tobytes()


@dataclass
class Trainer:
    """A publisher under a fence."""

    port: Run
    arena: Arena
    fence: Fence
    publisher: Publisher

    async def publish(self, step: int) -> bool:
        return await self.publisher.publish(self.version(step), tensors(step))

    def version(self, step: int) -> PolicyVersion:
        return PolicyVersion(self.fence.incarnation, step)

    async def manifest(self, step: int) -> Manifest:
        data = await self.port.manifest(self.version(step))
        assert data is not None
        return decode(data)


@pytest.fixture
def arena(tmp_path: Path) -> Arena:
    return Arena(tmp_path)


@pytest.fixture
async def trainer(run: Run, run_id: str, arena: Arena) -> AsyncIterator[Trainer]:
    """Publishes at most two live versions. Afterwards no segment and no lease is left."""
    fence = await run.take_fence(0)
    trainer = Trainer(run, arena, fence, Publisher(run, fence, LAYOUT, run_id, 2, host=HOST, arena=arena))
    yield trainer
    await trainer.publisher.close()
    assert list(arena.folder.iterdir()) == []
    assert await run.leased() == {}


class ShmAndNews(ShmTransport):
    """The shm transport, which calls `news` after each fetch."""

    def __init__(self, arena: Arena, news: Callable[[], Awaitable[object]]) -> None:
        super().__init__(HOST, arena)
        self._news = news

    async def open(self, manifest: Manifest) -> Source | Unavailable:  # type: ignore[override]
        source = await super().open(manifest)
        return source if isinstance(source, Unavailable) else _SourceAndNews(source, self._news)


class _SourceAndNews:
    def __init__(self, source: Source, news: Callable[[], Awaitable[object]]) -> None:
        self._source = source
        self._news = news

    async def fetch(self, ranges: Sequence[Range], out: Bytes, pace: Pace) -> Unavailable | None:
        answer = await self._source.fetch(ranges, out, pace)
        await self._news()
        return answer

    async def close(self) -> None:
        await self._source.close()


@asynccontextmanager
async def receiving(
    trainer: Trainer, engine: Engine, *, news: Callable[[], Awaitable[object]] | None = None, round_bytes: int = 1 << 20
) -> AsyncIterator[Receiver]:
    """A receiver that runs until the end of the block, and must then end by itself."""
    arena = trainer.arena
    receiver = Receiver(
        trainer.port,
        engine,
        "producer-0",
        HOST,
        run_id=(await trainer.port.record()).run_id,
        lease_s=LEASE_S,
        block_ms=50,
        round_bytes=round_bytes,
        transport=ShmAndNews(arena, news) if news else ShmTransport(HOST, arena),
    )
    stopping = asyncio.Event()
    task = asyncio.create_task(receiver.run(stopping))
    try:
        yield receiver
    finally:
        stopping.set()
        await asyncio.wait_for(task, 20)


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


async def test_publish_is_skipped_while_readers_hold_all_segments(trainer: Trainer) -> None:
    port = trainer.port
    assert await trainer.publish(0)
    await port.lease(trainer.version(0), "reader", 60)
    assert await trainer.publish(1)
    assert not await trainer.publish(2)
    assert trainer.publisher.stats().skipped == 1
    assert await port.head() == trainer.version(1)
    await port.release(trainer.version(0), "reader")
    assert await trainer.publish(3)
    assert [name.version.step for name in trainer.arena.segments()] == [3]
    assert [await port.manifest(trainer.version(step)) is None for step in (0, 1, 2, 3)] == [True, True, True, False]


async def test_event_loop_lives_while_the_publisher_casts(trainer: Trainer) -> None:
    loop_was_free = threading.Event()

    class Slow:
        """A tensor that can be cast only once something else ran on the event loop."""

        shape = (7,)

        def detach(self) -> torch.Tensor:
            asyncio.run_coroutine_threadsafe(set_free(), loop)
            assert loop_was_free.wait(20), "the event loop stood still while a tensor was cast"
            return torch.zeros(7)

    async def set_free() -> None:
        loop_was_free.set()

    loop = asyncio.get_running_loop()
    values: dict[str, object] = {**tensors(0), "norm": Slow()}
    assert await trainer.publisher.publish(trainer.version(0), values)  # type: ignore[arg-type]


async def test_fenced_trainer_leaves_no_segment(trainer: Trainer) -> None:
    await trainer.port.take_fence(0)
    with pytest.raises(Fenced):
        await trainer.publish(0)
    assert trainer.arena.segments() == []


async def test_new_incarnation_frees_what_a_dead_one_left(trainer: Trainer, run_id: str) -> None:
    left = trainer.arena.create(run_id, trainer.version(7), 100)
    left.seal()
    file = trainer.arena.folder / left.name
    dead = file.with_name(left.name.replace(f"-{left.name.split('-')[-3]}-", "-1-"))
    file.rename(dead)
    fence = await trainer.port.take_fence(0)
    publisher = Publisher(trainer.port, fence, LAYOUT, run_id, 2, host=HOST, arena=trainer.arena)
    version = PolicyVersion(fence.incarnation, 0)
    assert await publisher.publish(version, tensors(0))
    assert [name.version for name in trainer.arena.segments()] == [version]
    await publisher.close()
    await publisher.close()
    with pytest.raises(WeightError, match="its publisher is closed"):
        await publisher.publish(version, tensors(0))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda values: values.pop("norm"), "'norm' is missing"),
        (lambda values: values.update(extra=torch.zeros(1)), "'extra' is not in the layout"),
        (lambda values: values.update(norm=torch.zeros(8)), r"'norm' has shape \[8\]"),
    ],
    ids=["missing", "unknown", "shape"],
)
async def test_tensors_that_do_not_fit_are_named(
    trainer: Trainer, change: Callable[[dict[str, torch.Tensor]], object], sentence: str
) -> None:
    values = tensors(0)
    change(values)
    with pytest.raises(WeightError, match=sentence):
        await trainer.publisher.publish(trainer.version(0), values)
    assert trainer.arena.segments() == []


async def test_version_of_another_incarnation_is_refused(trainer: Trainer) -> None:
    with pytest.raises(WeightError, match=f"this trainer is incarnation {trainer.fence.incarnation}"):
        await trainer.publisher.publish(PolicyVersion(trainer.fence.incarnation + 1, 0), tensors(0))


async def test_strided_and_already_cast_tensors_are_published_as_they_are(trainer: Trainer) -> None:
    values = tensors(3)
    values["embed"] = values["embed"].bfloat16().T.contiguous().T
    assert not values["embed"].is_contiguous()
    assert await trainer.publisher.publish(trainer.version(0), values)
    manifest = await trainer.manifest(0)
    data = trainer.arena.open(manifest.segment, LAYOUT.nbytes)
    assert data is not None
    assert data.tobytes() == flat(values)


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
