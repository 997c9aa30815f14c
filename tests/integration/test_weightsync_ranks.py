"""A trainer of two ranks: each publishes its rows, the receiver commits the whole, to the bit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import torch

from broker.api import Fence
from broker.connect import Run
from headrace.errors import WeightError
from headrace.version import PolicyVersion
from tests.weights import HOST, Engine, Trainer, receiving, tensors
from weightsync.arena import Arena
from weightsync.manifest import Layout
from weightsync.publisher import Publisher

WaitUntil = Callable[..., Awaitable[None]]
LAYOUT = Layout.of(
    [
        ("embed", "bfloat16", (33, 8)),
        ("one row", "float32", (1, 5)),
        ("scale", "float32", ()),
        ("norm", "float32", (7,)),
        ("empty", "float16", (0, 3)),
        ("head", "float16", (3, 5)),
    ],
    parts=2,
    chunk_bytes=64,
)


class Ranks:
    """The ranks of this process. Each says something at each point, and waits for what the others say."""

    def __init__(self, rank: int, said: list[list[bytes]], changed: asyncio.Condition) -> None:
        self.rank = rank
        self._said = said
        self._changed = changed
        self._at = 0

    async def gather(self, mine: bytes) -> list[bytes]:
        at, self._at = self._at, self._at + 1
        async with self._changed:
            self._said[self.rank].append(mine)
            self._changed.notify_all()
            await self._changed.wait_for(lambda: all(len(said) > at for said in self._said))
        return [said[at] for said in self._said]


class TwoRanks:
    """Publishers with the interface of one."""

    def __init__(self, run: Run, fence: Fence, run_id: str, arena: Arena) -> None:
        said: list[list[bytes]] = [[], []]
        changed = asyncio.Condition()
        self.ranks = [
            Publisher(run, fence, LAYOUT, run_id, 2, host=HOST, arena=arena, ranks=Ranks(rank, said, changed))
            for rank in (0, 1)
        ]

    async def publish(self, version: PolicyVersion, values: dict[str, torch.Tensor]) -> list[bool]:
        return await asyncio.gather(
            *(publisher.publish(version, rows(values, rank)) for rank, publisher in enumerate(self.ranks))
        )

    async def close(self) -> None:
        await asyncio.gather(*(publisher.close() for publisher in self.ranks))


def rows(values: dict[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    """Of one rank, as FSDP2 shards parameters; scalars are everywhere."""
    mine = {}
    for name, value in values.items():
        shares = value.chunk(2) if value.dim() else [value] * 2
        mine[name] = shares[rank] if rank < len(shares) else value[:0]
    return mine


@pytest.fixture
async def two(run: Run, run_id: str, tmp_path: Path) -> AsyncIterator[tuple[TwoRanks, Trainer]]:
    fence = await run.take_fence(0)
    two = TwoRanks(run, fence, run_id, Arena(tmp_path))
    yield two, Trainer(run, run_id, Arena(tmp_path), fence, two.ranks[0])
    await two.close()
    assert Arena(tmp_path).segments() == []


async def test_rows_of_both_ranks_are_committed_as_one_version(
    two: tuple[TwoRanks, Trainer], wait_until: WaitUntil
) -> None:
    ranks, trainer = two
    for step in range(5):
        assert await ranks.publish(trainer.version(step), tensors(step, LAYOUT)) == [True, True]
    engine = Engine(LAYOUT)
    async with receiving(trainer, engine, round_chunks=2) as receiver:
        await wait_until(lambda: engine.version == trainer.version(4), "the newest version is committed")
        assert await ranks.publish(trainer.version(5), tensors(5, LAYOUT)) == [True, True]
        await wait_until(lambda: engine.version == trainer.version(5), "the next version is committed")
        assert receiver.stats().damaged == receiver.stats().refused == 0
    assert len((await trainer.manifest(5)).parts) == 2
    assert trainer.live == [5, 5]


async def test_second_rank_finds_room_though_the_first_moves_the_head_late(
    two: tuple[TwoRanks, Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, trainer = two
    may = asyncio.Event()
    publish_head = trainer.port.publish_head

    async def held(fence: Fence, version: PolicyVersion, manifest: bytes) -> None:
        if version.step == 1:
            await may.wait()
        await publish_head(fence, version, manifest)

    monkeypatch.setattr(trainer.port, "publish_head", held)
    for step in (0, 1):
        assert await ranks.publish(trainer.version(step), tensors(step, LAYOUT)) == [True, True]
    third = asyncio.create_task(ranks.publish(trainer.version(2), tensors(2, LAYOUT)))
    for _ in range(20):
        # Time enough for the second rank to ask whatever it would.
        await trainer.port.leased()
    may.set()
    assert await third == [True, True]


async def test_version_is_skipped_by_both_ranks_or_by_none(two: tuple[TwoRanks, Trainer]) -> None:
    ranks, trainer = two
    for step in (0, 1):
        assert await ranks.publish(trainer.version(step), tensors(step, LAYOUT)) == [True, True]
    await asyncio.gather(*(publisher.sealed() for publisher in ranks.ranks))
    await trainer.port.lease(trainer.version(1), "reader", 60)
    for name in trainer.arena.segments(trainer.run_id):
        if name.part == 1:
            # Only the second rank has room.
            trainer.arena.remove(name)
    assert await ranks.publish(trainer.version(2), tensors(2, LAYOUT)) == [True, True]
    await asyncio.gather(*(publisher.sealed() for publisher in ranks.ranks))
    assert await ranks.publish(trainer.version(3), tensors(3, LAYOUT)) == [False, False]
    assert [publisher.stats().skipped for publisher in ranks.ranks] == [1, 1]
    await trainer.port.release(trainer.version(1), "reader")
    assert await ranks.publish(trainer.version(4), tensors(4, LAYOUT)) == [True, True]


async def test_rank_with_rows_of_another_shape_is_told_its_own(two: tuple[TwoRanks, Trainer]) -> None:
    ranks, trainer = two
    with pytest.raises(WeightError, match=r"'embed' has shape \[33, 8\], the layout says \[16, 8\]"):
        await ranks.ranks[1].publish(trainer.version(0), tensors(0, LAYOUT))
