"""What the tests of publisher and receiver share: a small model, an engine of two buffers, a trainer, a producer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np
import torch

from broker.api import Fence
from broker.connect import Run
from headrace.version import PolicyVersion
from weightsync.arena import Arena
from weightsync.digests import Pace
from weightsync.manifest import Layout, Manifest, decode
from weightsync.placement import Bytes, Placement
from weightsync.publisher import Publisher
from weightsync.receiver import Receiver
from weightsync.transports.api import Base, Source, Unavailable
from weightsync.transports.shm import ShmTransport

torch.set_num_threads(1)
HOST = "this-host"
LEASE_S = 0.6
LAYOUT = Layout.of(
    [("embed", "bfloat16", (32, 8)), ("norm", "float32", (7,)), ("head", "float16", (3, 5))], chunk_bytes=64
)
"""In several chunks: the first tensor has eight."""


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
        """Answers when it is the head, or was skipped."""
        done = await self.publisher.publish(self.version(step), tensors(step))
        await self.publisher.sealed()
        return done

    def version(self, step: int) -> PolicyVersion:
        return PolicyVersion(self.fence.incarnation, step)

    async def manifest(self, step: int) -> Manifest:
        data = await self.port.manifest(self.version(step))
        assert data is not None
        return decode(data)


@asynccontextmanager
async def training(run: Run, run_id: str, arena: Arena) -> AsyncIterator[Trainer]:
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

    async def open(  # type: ignore[override]
        self, manifest: Manifest, part: int, base: Base | None = None
    ) -> Source | Unavailable:
        source = await super().open(manifest, part, base)
        return source if isinstance(source, Unavailable) else _SourceAndNews(source, self._news)


class _SourceAndNews:
    def __init__(self, source: Source, news: Callable[[], Awaitable[object]]) -> None:
        self._source = source
        self._news = news

    async def fetch(self, chunks: range, out: Placement, pace: Pace) -> list[bytes] | Unavailable:
        answer = await self._source.fetch(chunks, out, pace)
        await self._news()
        return answer

    async def close(self) -> None:
        await self._source.close()


@asynccontextmanager
async def receiving(
    trainer: Trainer,
    engine: Engine,
    *,
    news: Callable[[], Awaitable[object]] | None = None,
    round_chunks: int = 1 << 10,
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
        round_chunks=round_chunks,
        transport=ShmAndNews(arena, news) if news else ShmTransport(HOST, arena),
    )
    stopping = asyncio.Event()
    task = asyncio.create_task(receiver.run(stopping))
    try:
        yield receiver
    finally:
        stopping.set()
        await asyncio.wait_for(task, 20)
