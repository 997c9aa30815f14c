"""Real processes killed in the middle: no torn version is committed, the others go on, and no segment is left.

This file is also the program of the children: `python FILE trainer|producer WHERE` stops for ever at WHERE, says so
on its standard output, and is killed there.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch

from broker.api import Fence, RunRecord
from broker.connect import Run, connect_run
from headrace.config import BrokerConfig, Config, WeightsConfig
from headrace.version import PolicyVersion
from weightsync.arena import Arena, Bytes
from weightsync.digests import Pace, digests_of
from weightsync.manifest import Layout, Manifest, decode
from weightsync.publisher import Publisher
from weightsync.receiver import Receiver
from weightsync.transports.api import Range, Source, Unavailable
from weightsync.transports.shm import ShmTransport

torch.set_num_threads(1)
HOST = "fault-host"
LEASE_S = 1.0
LAYOUT = Layout.of([("first", "bfloat16", (4096, 64)), ("middle", "float32", (1000,)), ("last", "float16", (99, 7))])
WaitUntil = Callable[..., Awaitable[None]]


def tensors(step: int) -> dict[str, torch.Tensor]:
    """Every element says which step it is of, so that a mixed version shows."""
    return {spec.name: torch.full(spec.shape, float(step)) for spec in LAYOUT.tensors}


class Engine:
    """Commits, and checks by itself that what it commits is one whole version."""

    def __init__(self) -> None:
        self.version: PolicyVersion | None = None
        self.history: list[PolicyVersion] = []
        self.torn: list[PolicyVersion] = []
        self._buffer = np.zeros(LAYOUT.nbytes, np.uint8)

    def back_buffer(self, layout: Layout) -> Bytes:
        return self._buffer

    async def commit(self, version: PolicyVersion) -> float:
        for spec in LAYOUT.tensors:
            dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[spec.dtype]
            values = torch.from_numpy(self._buffer[spec.offset : spec.end]).view(dtype)
            if not bool((values == float(version.step)).all()):
                self.torn.append(version)
        self.version = version
        self.history.append(version)
        return 0.0


# -- the children


def stop_here(where: str, wanted: str) -> None:
    if where == wanted:
        print(where, flush=True)
        threading.Event().wait()


class StopsAtCast:
    """The middle tensor of a version: its cast never ends."""

    shape = (1000,)

    def detach(self) -> torch.Tensor:
        stop_here("casting", "casting")
        raise AssertionError


class StopsInFetch(ShmTransport):
    """Fetches the first half, then stops for ever."""

    async def open(self, manifest: Manifest) -> Source | Unavailable:  # type: ignore[override]
        source = await super().open(manifest)
        assert not isinstance(source, Unavailable)
        return _HalfSource(source)


class _HalfSource:
    def __init__(self, source: Source) -> None:
        self._source = source

    async def fetch(self, ranges: Sequence[Range], out: Bytes, pace: Pace) -> Unavailable | None:
        await self._source.fetch([(0, LAYOUT.nbytes // 2)], out, pace)
        stop_here("fetching", "fetching")
        return None

    async def close(self) -> None:
        await self._source.close()


async def be_trainer(run: Run, where: str, arena: Arena) -> None:
    """Publishes step 0, then stops while it casts step 1, or after it sealed it."""
    fence = await run.take_fence(0)
    record = await run.record()
    publisher = Publisher(run, fence, LAYOUT, record.run_id, 3, host=HOST, arena=arena)
    await publisher.publish(PolicyVersion(fence.incarnation, 0), tensors(0))
    second: dict[str, object] = {**tensors(1)}
    if where == "casting":
        second["middle"] = StopsAtCast()
    await publisher.publish(PolicyVersion(fence.incarnation, 1), second)  # type: ignore[arg-type]
    stop_here(where, "sealed")


async def be_producer(run: Run, where: str, arena: Arena) -> None:
    """Stops while it fetches its first version, or in the commit of it."""

    class StopsInCommit(Engine):
        async def commit(self, version: PolicyVersion) -> float:
            stop_here(where, "committing")
            raise AssertionError

    record = await run.record()
    transport = StopsInFetch(HOST, arena) if where == "fetching" else ShmTransport(HOST, arena)
    receiver = Receiver(
        run, StopsInCommit(), "child", HOST, run_id=record.run_id, lease_s=LEASE_S, block_ms=100, transport=transport
    )
    await receiver.run(asyncio.Event())


async def child(role: str, where: str) -> None:
    run = connect_run(os.environ["HEADRACE_REDIS_URL"], os.environ["HEADRACE_RUN"])
    await {"trainer": be_trainer, "producer": be_producer}[role](run, where, Arena())


# -- the tests


@dataclass
class Scene:
    """One run on one host: its broker, its segments, and the processes that a test starts."""

    run: Run
    run_id: str
    url: str
    arena: Arena
    stack: ExitStack
    publishers: list[Publisher] = field(default_factory=list)

    def spawn(self, *command: str) -> subprocess.Popen[bytes]:
        known = {
            "HEADRACE_REDIS_URL": self.url,
            "HEADRACE_RUN": self.run_id,
            "HEADRACE_SHM_DIR": str(self.arena.folder),
            "PYTHONPATH": str(Path(__file__).parents[2]),
        }
        process = subprocess.Popen(
            [sys.executable, *command], env={**os.environ, **known}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self.stack.callback(_bury, process)
        return process

    async def stopped(self, role: str, where: str) -> subprocess.Popen[bytes]:
        """A child that stands still at `where`."""
        process = self.spawn(__file__, role, where)
        assert process.stdout is not None
        assert await asyncio.to_thread(process.stdout.readline) == f"{where}\n".encode()
        return process

    async def publisher(self, live: int = 3) -> tuple[Publisher, Fence]:
        """A trainer of this process, of a new incarnation."""
        fence = await self.run.take_fence(0)
        self.publishers.append(Publisher(self.run, fence, LAYOUT, self.run_id, live, host=HOST, arena=self.arena))
        return self.publishers[-1], fence

    def receive(self, engine: Engine, stopping: asyncio.Event) -> asyncio.Task[None]:
        receiver = Receiver(
            self.run,
            engine,
            "here",
            HOST,
            run_id=self.run_id,
            lease_s=LEASE_S,
            block_ms=50,
            transport=ShmTransport(HOST, self.arena),
        )
        return asyncio.create_task(receiver.run(stopping))

    def live(self) -> list[PolicyVersion]:
        return [name.version for name in self.arena.segments(self.run_id)]


def _bury(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


@pytest.fixture
def record(run_id: str) -> RunRecord:
    broker = BrokerConfig(stream_block_ms=100, connect_timeout_s=5.0)
    config = Config(broker=broker, weights=WeightsConfig(lease_s=LEASE_S)).model_dump(mode="json")
    return RunRecord(run_id, 1, config, {}, vocab_size=10)


@pytest.fixture
async def scene(run: Run, run_id: str, redis_url: str, tmp_path: Path) -> AsyncIterator[Scene]:
    with ExitStack() as stack:
        scene = Scene(run, run_id, redis_url, Arena(tmp_path), stack)
        yield scene
        for publisher in scene.publishers:
            await publisher.close()


@pytest.mark.parametrize(("where", "usable"), [("casting", 0), ("sealed", 1)])
async def test_killed_trainer_leaves_its_last_sealed_version_and_no_other(
    scene: Scene, wait_until: WaitUntil, where: str, usable: int
) -> None:
    host_service = scene.spawn("-m", "weightsync")
    trainer = await scene.stopped("trainer", where)
    if where == "casting":
        assert PolicyVersion(1, 1) in scene.live(), "the version that is being cast has a segment"
    trainer.kill()
    trainer.wait()
    await wait_until(lambda: scene.live() == [PolicyVersion(1, usable)], "only the sealed head is left")

    # Who joins now still gets the head of the dead trainer.
    engine, stopping = Engine(), asyncio.Event()
    receiving = scene.receive(engine, stopping)
    await wait_until(lambda: engine.version == PolicyVersion(1, usable), "the dead trainer's head is committed")

    publisher, fence = await scene.publisher()
    version = PolicyVersion(fence.incarnation, 5)
    assert await publisher.publish(version, tensors(5))
    await wait_until(lambda: engine.version == version, "the new trainer's version is committed")
    await wait_until(lambda: scene.live() == [version], "the dead trainer's segment is freed")
    stopping.set()
    await receiving
    assert engine.torn == []

    await scene.run.set_status("finished", "")
    await publisher.close()
    assert await asyncio.to_thread(host_service.wait, 20) == 0
    assert list(scene.arena.folder.iterdir()) == []


async def test_run_whose_trainer_died_for_good_leaves_nothing(scene: Scene, wait_until: WaitUntil) -> None:
    host_service = scene.spawn("-m", "weightsync")
    trainer = await scene.stopped("trainer", "casting")
    trainer.kill()
    trainer.wait()
    await wait_until(lambda: scene.live() == [PolicyVersion(1, 0)], "only the head is left")
    host_service.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(host_service.wait, 20) == 0
    assert list(scene.arena.folder.iterdir()) == []


@pytest.mark.parametrize("where", ["fetching", "committing"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=lambda how: how.name)
async def test_dead_or_frozen_reader_holds_up_nobody(
    scene: Scene, wait_until: WaitUntil, where: str, how: signal.Signals
) -> None:
    publisher, fence = await scene.publisher(live=3)

    def version(step: int) -> PolicyVersion:
        return PolicyVersion(fence.incarnation, step)

    assert await publisher.publish(version(0), tensors(0))
    reader = await scene.stopped("producer", where)
    reader.send_signal(how)
    engine, stopping = Engine(), asyncio.Event()
    receiving = scene.receive(engine, stopping)
    for step in (1, 2, 3):
        assert await publisher.publish(version(step), tensors(step)), "no version is skipped for one reader"
        await wait_until(lambda step=step: engine.version == version(step), f"version {step} is committed")
    stopping.set()
    await receiving
    assert engine.torn == []

    async def lapsed() -> bool:
        return await scene.run.leased() == {}

    await wait_until(lapsed, "the reader's lease has lapsed")
    assert await publisher.publish(version(4), tensors(4))
    assert scene.live() == [version(4)]


async def test_killed_service_holds_up_nobody(scene: Scene, wait_until: WaitUntil) -> None:
    host_service = scene.spawn("-m", "weightsync")

    async def there() -> bool:
        return any(peer.role == "weights" for peer in await scene.run.peers())

    await wait_until(there, "the service has said hello")
    host_service.kill()
    engine, stopping = Engine(), asyncio.Event()
    receiving = scene.receive(engine, stopping)
    publisher, fence = await scene.publisher()
    for step in range(3):
        assert await publisher.publish(PolicyVersion(fence.incarnation, step), tensors(step))
    await wait_until(lambda: engine.version == PolicyVersion(fence.incarnation, 2), "the newest version is committed")
    stopping.set()
    await receiving
    await publisher.close()
    assert list(scene.arena.folder.iterdir()) == []


async def test_stale_trainer_that_wakes_up_changes_nothing(scene: Scene, wait_until: WaitUntil) -> None:
    old, old_fence = await scene.publisher()
    assert await old.publish(PolicyVersion(old_fence.incarnation, 9), tensors(9))
    new, new_fence = await scene.publisher()
    version = PolicyVersion(new_fence.incarnation, 3)
    assert await new.publish(version, tensors(3))
    from headrace.errors import Fenced

    with pytest.raises(Fenced):
        await old.publish(PolicyVersion(old_fence.incarnation, 10), tensors(10))
    await old.close()
    assert await scene.run.head() == version
    assert scene.live() == [version]
    data = await scene.run.manifest(version)
    assert data is not None
    manifest = decode(data)
    mapped = scene.arena.open(manifest.segment, LAYOUT.nbytes)
    assert mapped is not None
    assert digests_of(LAYOUT, mapped) == manifest.digests


if __name__ == "__main__":
    asyncio.run(child(*sys.argv[1:]))
