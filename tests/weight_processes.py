"""Trainers and producers as processes that stop at a step of the protocol, to be killed or frozen there."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from broker.api import Fence
from broker.connect import Run, connect_run
from headrace.errors import Fenced
from headrace.version import PolicyVersion
from tests.warm import FORKS
from tests.weights import HOST, LAYOUT, Engine, Gate, Host, receiving, tensors
from weightsync import filling
from weightsync.arena import Arena
from weightsync.digests import Pace, digest_of
from weightsync.publisher import Publisher

TRAINER_STEPS = ("announced", "copying", "digesting", "copied", "sealed", "head moved")
"""Of its step 1; step 0 is the head by then."""
PRODUCER_STEPS = ("fetching", "waiting for the seal", "committing")
"""Of its first version."""
READER_LEASE_S = 1.0


class Child:
    """The test's end of one."""

    def __init__(self, role: Literal["trainer", "producer"], host: Host, url: str, at: str) -> None:
        self._pipe, theirs = FORKS.Pipe()
        arguments = role, url, host.run_id, host.arena.folder, at, theirs
        self._process = FORKS.Process(target=_be, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    async def says(self) -> str:
        """What it says next: where it stands still, or what came of it."""
        assert await asyncio.to_thread(self._pipe.poll, 60), "the process said nothing for a minute"
        said: str = self._pipe.recv()
        return said

    def meets(self, how: signal.Signals) -> None:
        """SIGKILL or SIGSTOP."""
        assert self._process.pid is not None
        os.kill(self._process.pid, how)
        if how == signal.SIGKILL:
            self._process.join(20)

    def goes_on(self) -> None:
        """It wakes up, and leaves the place where it stood."""
        self._pipe.send(None)
        self.meets(signal.SIGCONT)

    def bury(self) -> None:
        self._process.kill()
        self._process.join(20)
        self._process.close()
        self._pipe.close()


@asynccontextmanager
async def child(role: Literal["trainer", "producer"], host: Host, url: str, at: str) -> AsyncIterator[Child]:
    """One that stands still at this step."""
    made = Child(role, host, url, at)
    try:
        assert await made.says() == at
        yield made
    finally:
        made.bury()


# -- in the process


class Stop:
    """Where it stands still, once."""

    def __init__(self, at: str, pipe: Connection) -> None:
        self.at = at
        self._pipe = pipe
        self._stood = False

    def here(self, at: str) -> None:
        if at == self.at and not self._stood:
            self._stood = True
            self._pipe.send(at)
            self._pipe.recv()


class StopsInCalls:
    """A port that stops before or after a call about step 1."""

    def __init__(self, run: Run, stop: Stop) -> None:
        self._run = run
        self._stop = stop

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run, name)

    async def announce(self, fence: Fence, version: PolicyVersion, manifest: bytes) -> None:
        await self._run.announce(fence, version, manifest)
        if version.step == 1:
            self._stop.here("announced")

    async def publish_head(self, fence: Fence, version: PolicyVersion, manifest: bytes) -> None:
        if version.step == 1:
            self._stop.here("sealed")
        await self._run.publish_head(fence, version, manifest)
        if version.step == 1:
            self._stop.here("head moved")


class StopsInCast(Gate):
    def __init__(self, tensor: Any, stop: Stop) -> None:
        super().__init__(tensor)
        self.open()
        self._stop = stop

    def detach(self) -> Any:
        self._stop.here("copying")
        return super().detach()


class StopsInDigest:
    """Stands still in the second chunk; or, where the publisher is to return first, waits in the last one."""

    def __init__(self, stop: Stop) -> None:
        self.may_end = threading.Event()
        self._stop = stop
        self._chunk = 0

    def __call__(self, views: Sequence[memoryview], pace: Pace | None = None) -> bytes:
        self._chunk += 1
        if self._chunk == 2:
            self._stop.here("digesting")
        if self._chunk == LAYOUT.chunks(0) and self._stop.at == "copied":
            self.may_end.wait()
        return digest_of(views, pace)


def _be(role: str, url: str, run_id: str, folder: Path, at: str, pipe: Connection) -> None:
    act = {"trainer": _be_trainer, "producer": _be_producer}[role]
    asyncio.run(act(Host(connect_run(url, run_id), run_id, Arena(folder)), Stop(at, pipe), pipe))


async def _be_trainer(host: Host, stop: Stop, pipe: Connection) -> None:
    fence = await host.port.take_fence(0)
    port: Any = StopsInCalls(host.port, stop)
    publisher = Publisher(port, fence, LAYOUT, host.run_id, 3, host=HOST, arena=host.arena)
    await publisher.publish(PolicyVersion(fence.incarnation, 0), tensors(0))
    await publisher.sealed()
    digest = StopsInDigest(stop)
    setattr(filling, "digest_of", digest)  # noqa: B010
    values: dict[str, Any] = tensors(1)
    values["norm"] = StopsInCast(values["norm"], stop)
    try:
        await publisher.publish(PolicyVersion(fence.incarnation, 1), values)
        stop.here("copied")
        digest.may_end.set()
        await publisher.sealed()
        await publisher.publish(PolicyVersion(fence.incarnation, 2), tensors(2))
        await publisher.sealed()
    except Fenced:
        said = "fenced"
    else:
        said = "published"
    await publisher.close()
    pipe.send(said)


async def _be_producer(host: Host, stop: Stop, pipe: Connection) -> None:
    class StopsInCommit(Engine):
        async def commit(self, version: PolicyVersion) -> float:
            stop.here("committing")
            seconds = await super().commit(version)
            pipe.send(f"{version} {'torn' if self.torn else 'whole'}")
            return seconds

    rounds = iter(("fetching", "waiting for the seal"))

    async def fetched() -> None:
        stop.here(next(rounds, ""))

    half = LAYOUT.chunks(0) // 2
    async with receiving(
        host, StopsInCommit(), holder="child", lease_s=READER_LEASE_S, news=fetched, round_chunks=half
    ):
        await asyncio.Event().wait()
