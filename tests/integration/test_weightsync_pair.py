"""Publisher and receiver against a broker that lives in this process: what is published is what is committed."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from broker.api import Fence
from headrace.errors import Fenced, WeightError
from headrace.version import PolicyVersion
from weightsync.arena import Arena, Bytes
from weightsync.manifest import Layout, decode
from weightsync.publisher import Publisher
from weightsync.receiver import Receiver

torch.set_num_threads(1)
HOST = socket.gethostname()
RUN = "pair-test"
FENCE = Fence(1, "nonce")
LAYOUT = Layout.of([("embed", "bfloat16", (32, 8)), ("norm", "float32", (7,)), ("head", "float16", (3, 5))])


class Port:
    """The weights' part of a broker, for one process."""

    def __init__(self) -> None:
        self.fence = FENCE
        self.manifests: dict[PolicyVersion, bytes] = {}
        self.newest: PolicyVersion | None = None
        self.leases: dict[PolicyVersion, list[str]] = {}
        self.moved = asyncio.Event()

    async def publish_head(self, fence: Fence, version: PolicyVersion, manifest: bytes) -> None:
        if fence != self.fence:
            raise Fenced("a newer trainer has taken the run")
        self.manifests[version] = manifest
        if self.newest is None or version > self.newest:
            self.newest = version
            self.moved.set()
            self.moved = asyncio.Event()

    async def head(self) -> PolicyVersion | None:
        return self.newest

    async def wait_head(self, after: PolicyVersion | None, block_ms: int) -> PolicyVersion | None:
        if self.newest is None or (after is not None and self.newest <= after):
            try:
                await asyncio.wait_for(self.moved.wait(), block_ms / 1000)
            except TimeoutError:
                return self.newest
        return self.newest

    async def manifest(self, version: PolicyVersion) -> bytes | None:
        return self.manifests.get(version)

    async def lease(self, version: PolicyVersion, holder: str, lease_s: float) -> None:
        holders = self.leases.setdefault(version, [])
        if holder not in holders:
            holders.append(holder)

    async def release(self, version: PolicyVersion, holder: str) -> None:
        holders = self.leases.get(version, [])
        if holder in holders:
            holders.remove(holder)
        if not holders:
            self.leases.pop(version, None)

    async def leased(self) -> dict[PolicyVersion, list[str]]:
        return dict(self.leases)

    async def forget(self, version: PolicyVersion) -> None:
        self.manifests.pop(version, None)


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


@pytest.fixture
def arena(tmp_path: Path) -> Arena:
    return Arena(tmp_path)


def publisher(port: Port, arena: Arena, live: int = 3) -> Publisher:
    return Publisher(port, FENCE, LAYOUT, RUN, live, host=HOST, arena=arena)  # type: ignore[arg-type]


@asynccontextmanager
async def receiving(port: Port, engine: Engine, arena: Arena) -> AsyncIterator[Receiver]:
    from weightsync.transports.shm import ShmTransport

    receiver = Receiver(
        port, engine, "producer-0", HOST, run_id=RUN, block_ms=50, transport=ShmTransport(HOST, arena)  # type: ignore[arg-type]
    )  # fmt: skip
    stopping = asyncio.Event()
    task = asyncio.create_task(receiver.run(stopping))
    try:
        yield receiver
    finally:
        stopping.set()
        await asyncio.wait_for(task, 20)


async def wait_until(predicate: Callable[[], bool], what: str) -> None:
    """Return as soon as `predicate()` holds; fail with `what` after 20 s."""
    for _ in range(4000):
        if predicate():
            return
        await asyncio.sleep(0.005)
    pytest.fail(f"waited 20 s for {what}")


async def test_engine_gets_the_published_bits_and_then_the_next_version(arena: Arena) -> None:
    port, engine = Port(), Engine()
    async with receiving(port, engine, arena) as receiver:
        trainer = publisher(port, arena)
        assert not receiver.first_version.is_set()
        for step in (0, 1):
            assert await trainer.publish(PolicyVersion(1, step), tensors(step))
            await wait_until(lambda s=step: engine.version == PolicyVersion(1, s), f"commit of step {step}")
            assert engine.front.tobytes() == flat(tensors(step))
        await receiver.ready()
        stats = receiver.stats()
        assert (stats.commits, stats.damaged, stats.staged_bytes) == (2, 0, 2 * LAYOUT.nbytes)
        assert stats.last_latency_s >= 0
        await trainer.close()
    assert list(arena.folder.iterdir()) == []
    assert port.leases == {}


async def test_flipped_byte_is_never_committed_and_the_next_version_is(arena: Arena) -> None:
    port, engine = Port(), Engine()
    trainer = publisher(port, arena)
    assert await trainer.publish(PolicyVersion(1, 0), tensors(0))
    (file,) = arena.folder.iterdir()
    data = bytearray(file.read_bytes())
    data[LAYOUT.tensors[1].offset] ^= 1
    file.write_bytes(data)
    async with receiving(port, engine, arena) as receiver:
        await wait_until(lambda: receiver.stats().damaged >= 2, "two refusals of the damaged version")
        assert engine.history == []
        assert await trainer.publish(PolicyVersion(1, 1), tensors(1))
        await wait_until(lambda: engine.version == PolicyVersion(1, 1), "commit of the next version")
        assert engine.front.tobytes() == flat(tensors(1))
    await trainer.close()


async def test_publish_is_skipped_while_readers_hold_all_segments(arena: Arena) -> None:
    port = Port()
    trainer = publisher(port, arena, live=2)
    assert await trainer.publish(PolicyVersion(1, 0), tensors(0))
    await port.lease(PolicyVersion(1, 0), "reader", 10)
    assert await trainer.publish(PolicyVersion(1, 1), tensors(1))
    assert not await trainer.publish(PolicyVersion(1, 2), tensors(2))
    assert trainer.stats().skipped == 1
    assert port.newest == PolicyVersion(1, 1)
    await port.release(PolicyVersion(1, 0), "reader")
    assert await trainer.publish(PolicyVersion(1, 3), tensors(3))
    assert [name.version.step for name in arena.segments(RUN)] == [3]
    assert set(port.manifests) == {PolicyVersion(1, 3)}
    await trainer.close()


async def test_reader_keeps_its_mapping_when_the_version_is_freed(arena: Arena) -> None:
    port = Port()
    trainer = publisher(port, arena)
    assert await trainer.publish(PolicyVersion(1, 0), tensors(0))
    manifest = decode(port.manifests[PolicyVersion(1, 0)])
    mapped = arena.open(manifest.segment, LAYOUT.nbytes)
    await trainer.close()
    assert arena.segments() == []
    assert arena.open(manifest.segment, LAYOUT.nbytes) is None
    assert mapped is not None
    assert mapped.tobytes() == flat(tensors(0))


async def test_fenced_trainer_leaves_no_segment(arena: Arena) -> None:
    port = Port()
    trainer = publisher(port, arena)
    port.fence = Fence(2, "other")
    with pytest.raises(Fenced):
        await trainer.publish(PolicyVersion(1, 0), tensors(0))
    assert arena.segments() == []


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda values: values.pop("norm"), "'norm' is missing"),
        (lambda values: values.update(extra=torch.zeros(1)), "'extra' is not in the layout"),
        (lambda values: values.update(norm=torch.zeros(8)), r"'norm' has shape \[8\]"),
    ],
)
async def test_tensors_that_do_not_fit_are_named(arena: Arena, change, sentence: str) -> None:
    trainer = publisher(Port(), arena)
    values = tensors(0)
    change(values)
    with pytest.raises(WeightError, match=sentence):
        await trainer.publish(PolicyVersion(1, 0), values)
    assert arena.segments() == []
