"""What the tests of publisher and receiver share: a small model, an engine of two buffers, a trainer, a producer."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

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
HOST = socket.gethostname()
LEASE_S = 0.6
LAYOUT = Layout.of(
    [("embed", "bfloat16", (32, 8)), ("norm", "float32", (7,)), ("head", "float16", (3, 5))], chunk_bytes=64
)
"""In several chunks: the first tensor has eight."""


class Engine:
    """Two buffers and a version: what the receiver needs of an engine. Compares what it commits with its step."""

    def __init__(self, layout: Layout = LAYOUT) -> None:
        self.layout = layout
        self.version: PolicyVersion | None = None
        self.front, self.back = np.zeros((2, layout.nbytes), np.uint8)
        self.history: list[PolicyVersion] = []
        self.torn: list[PolicyVersion] = []

    def back_buffer(self, layout: Layout) -> Bytes:
        assert layout == self.layout
        return self.back

    async def commit(self, version: PolicyVersion) -> float:
        self._swap()
        self.version = version
        self.history.append(version)
        if self.front.tobytes() != flat(tensors(version.step, self.layout), self.layout):
            self.torn.append(version)
        return 0.0

    def _swap(self) -> None:
        self.front, self.back = self.back, self.front


class MappingEngine(Engine):
    """Reads versions of its host in place."""

    mapped: Bytes | None = None

    def map(self, layout: Layout, data: Bytes) -> None:
        assert layout == self.layout
        self.mapped = data

    def _swap(self) -> None:
        if self.mapped is None:
            super()._swap()
        else:
            self.front, self.mapped = self.mapped, None


def tensors(step: int, layout: Layout = LAYOUT) -> dict[str, torch.Tensor]:
    """Other ones for every step."""
    generator = torch.Generator().manual_seed(step)
    return {spec.name: torch.randn(spec.shape, generator=generator) for spec in layout.tensors}


def flat(values: Mapping[str, torch.Tensor], layout: Layout = LAYOUT) -> bytes:
    """The bytes that the layout should hold, made without the code under test."""
    dtypes = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    out = np.zeros(layout.nbytes, np.uint8)
    for spec in layout.tensors:
        data = values[spec.name].to(dtypes[spec.dtype]).reshape(-1).view(torch.uint8).numpy()
        out[spec.offset : spec.offset + spec.nbytes] = data
    return out.tobytes()


class Gate:
    """A tensor that is cast only once the gate is open. For any thread."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape = tensor.shape
        self.reached = threading.Event()
        self._tensor = tensor
        self._open = threading.Event()

    def open(self) -> None:
        self._open.set()

    def detach(self) -> torch.Tensor:
        self.reached.set()
        assert self._open.wait(60), "nobody opened the gate"
        return self._tensor.detach()


def gated(step: int, name: str) -> tuple[dict[str, torch.Tensor], Gate]:
    """The tensors of a step, of which one is behind a gate."""
    values = tensors(step)
    gate = Gate(values[name])
    return {**values, name: gate}, gate  # type: ignore[dict-item]


def flip(file: Path, at: int) -> None:
    """Change one bit of this byte; the second time it is as before."""
    with file.open("r+b") as stream:
        stream.seek(at)
        byte = stream.read(1)[0]
        stream.seek(at)
        stream.write(bytes([byte ^ 16]))


@dataclass
class Host:
    """One run on one host: a connection to its broker, and where its segments lie."""

    port: Run
    run_id: str
    arena: Arena

    @property
    def live(self) -> list[int]:
        """Steps that have a segment."""
        return [name.version.step for name in self.arena.segments(self.run_id)]


@dataclass
class Trainer(Host):
    """A publisher under a fence."""

    fence: Fence
    publisher: Publisher

    async def publish(self, step: int) -> bool:
        """Answers when it is the head, or was skipped."""
        done = await self.publisher.publish(self.version(step), tensors(step))
        await self.publisher.sealed()
        return done

    def version(self, step: int) -> PolicyVersion:
        return PolicyVersion(self.fence.incarnation, step)

    async def file(self, step: int) -> Path:
        """Of the segment of a version that was announced."""
        return self.arena.folder / (await self.manifest(step)).parts[0].segment

    async def manifest(self, step: int) -> Manifest:
        data = await self.port.manifest(self.version(step))
        assert data is not None
        return decode(data)


@asynccontextmanager
async def training(
    run: Run, run_id: str, arena: Arena, *, max_live: int = 2, alone: bool = True
) -> AsyncIterator[Trainer]:
    """Where nobody else is, no segment and no lease is left afterwards."""
    fence = await run.take_fence(0)
    publisher = Publisher(run, fence, LAYOUT, run_id, max_live, host=HOST, arena=arena)
    trainer = Trainer(run, run_id, arena, fence, publisher)
    try:
        yield trainer
    finally:
        await publisher.close()
    if alone:
        assert arena.segments() == []
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
    host: Host,
    engine: Engine,
    *,
    holder: str = "producer-0",
    lease_s: float = LEASE_S,
    news: Callable[[], Awaitable[object]] | None = None,
    round_chunks: int = 1 << 10,
) -> AsyncIterator[Receiver]:
    """A receiver that runs until the end of the block, and must then end by itself, without a torn version."""
    receiver = Receiver(
        host.port,
        engine,
        holder,
        HOST,
        run_id=host.run_id,
        lease_s=lease_s,
        block_ms=50,
        round_chunks=round_chunks,
        transport=ShmAndNews(host.arena, news) if news else ShmTransport(HOST, host.arena),
        in_place=host.arena if isinstance(engine, MappingEngine) else None,
    )
    stopping = asyncio.Event()
    task = asyncio.create_task(receiver.run(stopping))
    try:
        yield receiver
    finally:
        stopping.set()
        await asyncio.wait_for(task, 20)
    assert engine.torn == []
