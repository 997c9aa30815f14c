"""The publisher over a real broker: what it makes of tensors, and when it skips, frees or refuses."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from broker.connect import Run
from headrace.errors import Fenced, WeightError
from headrace.service import Service
from headrace.telemetry.metrics import Metrics
from headrace.version import PolicyVersion
from tests.weights import HOST, LAYOUT, Trainer, flat, gated, tensors, training
from weightsync import filling
from weightsync.arena import Arena, NewSegment, Segment
from weightsync.digests import Pace, digest_of
from weightsync.leasing import BASE
from weightsync.manifest import Layout
from weightsync.publisher import Publisher
from weightsync.service import WeightService

WaitUntil = Callable[..., Awaitable[None]]


@pytest.fixture
async def trainer(run: Run, run_id: str, tmp_path: Path) -> AsyncIterator[Trainer]:
    async with training(run, run_id, Arena(tmp_path)) as trainer:
        yield trainer


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
    assert trainer.live == [3]
    assert [await port.manifest(trainer.version(step)) is None for step in (0, 1, 2, 3)] == [True, True, True, False]


async def test_what_redis_forgot_of_the_newest_version_is_said_again(trainer: Trainer) -> None:
    await trainer.publisher.announce_again()
    assert await trainer.port.head() is None, "there is nothing to say yet"
    assert await trainer.publish(0)
    assert await trainer.publish(1)
    manifest = await trainer.port.manifest(trainer.version(1))
    await trainer.port.forget(trainer.version(1))
    await trainer.publisher.announce_again()
    assert await trainer.port.manifest(trainer.version(1)) == manifest
    assert await trainer.port.head() == trainer.version(1)


async def test_event_loop_lives_while_the_publisher_casts_and_closing_ends_it(
    trainer: Trainer, wait_until: WaitUntil
) -> None:
    values, gate = gated(0, "norm")
    publishing = asyncio.create_task(trainer.publisher.publish(trainer.version(0), values))
    await wait_until(gate.reached.is_set, "the second tensor is cast")
    assert trainer.live == [0]
    waiting = asyncio.create_task(trainer.publisher.publish(trainer.version(1), tensors(1)))
    closing = asyncio.create_task(trainer.publisher.close())
    # Both have begun.
    await trainer.port.head()
    gate.open()
    with pytest.raises(WeightError, match="its publisher closes"):
        await publishing
    with pytest.raises(WeightError, match="its publisher is closed"):
        await waiting
    await closing
    assert await trainer.port.head() is None


class HeldDigest:
    """The publisher's digest, whose fourth chunk is not done before it may be."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._may = threading.Event()
        self._chunks = 0
        monkeypatch.setattr(filling, "digest_of", self._digest_of)

    def let_go(self) -> None:
        self._may.set()

    def _digest_of(self, views: Sequence[memoryview], pace: Pace | None = None) -> bytes:
        self._chunks += 1
        assert self._chunks != 4 or self._may.wait(60)
        return digest_of(views, pace)


async def test_publish_returns_before_the_seal(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch, wait_until: WaitUntil
) -> None:
    held = HeldDigest(monkeypatch)
    values = tensors(0)
    assert await trainer.publisher.publish(trainer.version(0), values)
    for tensor in values.values():
        # The trainer's next step.
        tensor.zero_()
    begun = await trainer.manifest(0)
    reader = trainer.arena.open(begun.parts[0].segment, LAYOUT)
    assert reader is not None
    await wait_until(lambda: reader.ready() == 3, "three chunks can be read")
    assert (reader.complete, begun.sealed, await trainer.port.head()) == (False, False, None)
    held.let_go()
    await trainer.publisher.sealed()
    sealed = await trainer.manifest(0)
    assert (reader.ready(), reader.complete, sealed.sealed) == (LAYOUT.chunks(0), True, True)
    assert await trainer.port.head() == trainer.version(0)
    assert reader.digests(0, LAYOUT.chunks(0)) == [*sealed.parts[0].digests]
    content = bytearray(LAYOUT.nbytes)
    reader.read(0, [memoryview(content)])
    assert content == flat(tensors(0))
    reader.close()


@pytest.mark.parametrize("when", ["before", "behind its back"])
async def test_fenced_trainer_leaves_no_segment_and_is_told_at_the_next_publish(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    if when == "behind its back":
        held = HeldDigest(monkeypatch)
        assert await trainer.publisher.publish(trainer.version(0), tensors(0))
        await trainer.port.take_fence(0)
        held.let_go()
    else:
        await trainer.port.take_fence(0)
    with pytest.raises(Fenced):
        await trainer.publisher.publish(trainer.version(1), tensors(1))
    assert trainer.arena.segments() == []
    assert await trainer.port.head() is None


async def test_trainer_that_lost_the_run_frees_nothing_of_its_successor(
    trainer: Trainer, wait_until: WaitUntil
) -> None:
    assert await trainer.publish(0)
    async with training(trainer.port, trainer.run_id, trainer.arena, alone=False) as successor:
        values, gate = gated(5, "norm")
        publishing = asyncio.create_task(successor.publisher.publish(successor.version(5), values))
        await wait_until(gate.reached.is_set, "the successor is copying")
        assert not await trainer.publish(1), "it looks for room, and finds none"
        assert successor.live == [0, 5]
        gate.open()
        assert await publishing
        await successor.publisher.sealed()
        assert successor.live == [5]


async def test_manifest_is_dropped_before_its_segment(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer that stops between the two leaves something that others find and free."""
    dropped: dict[int, bool] = {}
    forget = trainer.port.forget

    async def noted(version: PolicyVersion) -> None:
        dropped[version.step] = version.step in trainer.live
        await forget(version)

    monkeypatch.setattr(trainer.port, "forget", noted)
    for step in (0, 1, 2):
        assert await trainer.publish(step)
    assert dropped == {0: True, 1: True}


async def test_memory_of_the_next_version_is_made_ready(trainer: Trainer) -> None:
    assert await trainer.publish(0)
    (spare,) = [name for name in trainer.arena.segments() if name.spare]
    assert trainer.live == [0], "a spare belongs to no version"
    memory = (trainer.arena.folder / str(spare)).stat().st_ino
    assert await trainer.publish(1)
    assert (await trainer.file(1)).stat().st_ino == memory
    for name in trainer.arena.segments():
        # Somebody cleans the folder.
        trainer.arena.remove(name)
    assert await trainer.publish(2)
    await trainer.port.lease(trainer.version(2), "reader", 60)
    assert await trainer.publish(3)
    assert [(name.version.step, name.spare) for name in trainer.arena.segments()] == [(2, False), (3, False)]
    await trainer.port.release(trainer.version(2), "reader")


async def test_pinned_version_is_kept_and_takes_no_room(trainer: Trainer) -> None:
    service = weight_service(trainer)
    assert await trainer.publish(0)
    await trainer.port.pin(trainer.version(0))
    for step in (1, 2, 3):
        assert await trainer.publish(step)
        assert trainer.live == [0, step]
        assert await service.collect_once() == []
    assert (await trainer.manifest(0)).sealed
    await trainer.publisher.close()
    assert trainer.live == [0]
    await trainer.port.unpin(trainer.version(0))
    assert [name.version.step for name in await service.collect_once()] == [0]


async def test_nothing_pinned_is_freed_by_a_look_at_a_redis_that_is_emptied_meanwhile(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = weight_service(trainer)
    assert await trainer.publish(0)
    await trainer.port.pin(trainer.version(0))
    for step in (1, 2):
        assert await trainer.publish(step)
    asked: list[str] = []
    for name, emptied in (
        ("head", None),
        ("leased", dict[PolicyVersion, list[str]]()),
        ("pinned", set[PolicyVersion]()),
    ):
        real = getattr(trainer.port, name)

        async def answer(
            name: str = name, real: Callable[[], Awaitable[object]] = real, emptied: object = emptied
        ) -> object:
            asked.append(name)
            return await real() if len(asked) == 1 else emptied

        monkeypatch.setattr(trainer.port, name, answer)
    for look in (trainer.publisher._free, service.collect_once):
        asked.clear()
        await look()
        assert set(asked) == {"head", "leased", "pinned"}
        assert trainer.live == [0, 2]
    monkeypatch.undo()
    await trainer.port.unpin(trainer.version(0))


async def test_head_of_a_dead_trainer_stays_however_old_until_the_next_one_publishes(
    trainer: Trainer, run_id: str
) -> None:
    assert await trainer.publish(7)
    for left in trainer.arena.segments():
        dead = replace(left, owner=replace(left.owner, pid=1))
        file = (trainer.arena.folder / str(left)).rename(trainer.arena.folder / str(dead))
        os.utime(file, (0, 0))
    fence = await trainer.port.take_fence(0)
    publisher = Publisher(trainer.port, fence, LAYOUT, run_id, 2, host=HOST, arena=trainer.arena)
    assert await weight_service(trainer).collect_once() == []
    (kept,) = trainer.arena.segments()
    assert (kept.version, kept.spare, kept.owner.pid) == (trainer.version(7), False, 1)
    version = PolicyVersion(fence.incarnation, 0)
    assert await publisher.publish(version, tensors(0))
    await publisher.sealed()
    assert [name.version for name in trainer.arena.segments(run_id)] == [version]
    await publisher.close()
    await publisher.close()
    with pytest.raises(WeightError, match="its publisher is closed"):
        await publisher.publish(version, tensors(0))


async def test_segment_that_is_cut_while_it_is_checked_is_damaged(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = weight_service(trainer)
    assert await trainer.publish(0)
    opened = trainer.arena.open

    def cut(name: str, layout: Layout, part: int = 0) -> Segment | None:
        segment = opened(name, layout, part)
        os.truncate(trainer.arena.folder / name, 5)
        return segment

    monkeypatch.setattr(trainer.arena, "open", cut)
    check, reason = service._verify(await trainer.manifest(0))
    assert check == "damaged"
    assert "gave 5 bytes of 64" in reason


def weight_service(trainer: Trainer) -> WeightService:
    return WeightService(
        trainer.port, Service("weights"), name="weights", run_id=trainer.run_id, host=HOST, lease_s=1.0, block_ms=100,
        metrics=Metrics(trainer.run_id, "weights"), arena=trainer.arena,
    )  # fmt: skip


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
    assert (await trainer.file(0)).read_bytes()[: LAYOUT.nbytes] == flat(values)


async def test_the_base_of_a_delta_is_kept_as_long_as_there_is_room(trainer: Trainer) -> None:
    assert await trainer.publish(0)
    await trainer.port.lease(trainer.version(0), BASE + "weights of another host", 60)
    assert await trainer.publish(1)
    assert [name.version.step for name in trainer.arena.segments()] == [0, 1]
    assert await trainer.publish(2), "no version is skipped for it"
    assert await trainer.port.head() == trainer.version(2)
    assert trainer.publisher.stats().skipped == 0
    await trainer.port.release(trainer.version(0), BASE + "weights of another host")


async def test_a_head_that_somebody_removed_is_found_out(trainer: Trainer) -> None:
    trainer.publisher.check_head()
    for step in range(2):
        assert await trainer.publish(step)
        await trainer.publisher.sealed()
        trainer.publisher.check_head()
    (await trainer.file(1)).unlink()
    with pytest.raises(WeightError, match=r"the weights of 1\.1 were removed from .* by another program .*RemoveIPC"):
        trainer.publisher.check_head()
    assert await trainer.publish(2)
    await trainer.publisher.sealed()
    trainer.publisher.check_head()


async def test_a_version_without_memory_is_skipped_once_there_was_some(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> NewSegment:
        raise WeightError("/dev/shm has 0 MB left")

    create = trainer.arena.create
    monkeypatch.setattr(trainer.arena, "create", full)
    with pytest.raises(WeightError, match="0 MB left"):
        await trainer.publish(0)
    monkeypatch.setattr(trainer.arena, "create", create)
    assert await trainer.publish(0)
    trainer.publisher._drop_spare()
    monkeypatch.setattr(trainer.arena, "create", full)
    assert not await trainer.publish(1)
    assert trainer.publisher.stats().skipped == 1
    monkeypatch.setattr(trainer.arena, "create", create)
    assert await trainer.publish(2)
