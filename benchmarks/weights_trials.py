"""Memory of producer and trainer while weights move, and everybody else while one receiver stands still."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM

from benchmarks.report import Figure
from benchmarks.weights_world import (
    RUN_ID,
    BareEngine,
    Host,
    Process,
    Sizes,
    as_service,
    llama,
    model_layout,
    random_bytes,
    redis_run,
    shared_folder,
    version,
)
from broker.connect import Run, connect_run
from headrace.config import WeightsConfig
from headrace.policy.loading import layout_of
from headrace.version import PolicyVersion
from producers.engines.packed_linear import can_pack
from producers.engines.weights import EngineWeights
from weightsync.filling import shape_of
from weightsync.manifest import Layout, encode
from weightsync.placement import Bytes
from weightsync.publisher import Publisher
from weightsync.receiver import Receiver
from weightsync.transports.shm import ShmTransport

RECEIVERS = 3
LIVE_VERSIONS = 3
SAMPLE_S = 0.002
SPARE_MIB = 64.0
MIB = float(1 << 20)
LOOK_S = 0.001


def memory(sizes: Sizes) -> dict[str, Figure]:
    """producer_memory and trainer_memory."""
    layout = model_layout(sizes.model_bytes)
    with shared_folder() as folder, redis_run() as url:
        producer = asyncio.run(_staged(Host(folder, "host"), folder, url, layout, sizes))
    with shared_folder() as folder, redis_run() as url:
        trainer = Process(trainer_process, url, folder, layout)
        with Watch(trainer.pid, folder / "host") as watch:
            for step in range(1, sizes.repeats + LIVE_VERSIONS):
                trainer.tell(step)
        trainer.close()
    beyond = watch.anonymous + max(0, watch.shared - LIVE_VERSIONS * layout.nbytes)
    return {
        name: Figure(value / MIB, "MiB", bar=SPARE_MIB, at_most=True)
        for name, value in (("producer_memory", producer), ("trainer_memory", beyond))
    }


async def _staged(host: Host, folder: Path, url: str, layout: Layout, sizes: Sizes) -> int:
    """Bytes that a producer takes at most, beyond two models and beyond three where its engine packs weights."""
    port = connect_run(url, RUN_ID)
    fence = await port.take_fence(0)
    first = host.publish(layout, 0, random_bytes(layout.nbytes))
    producer = Process(producer_process, url, folder, sizes.model_bytes)
    with Watch(producer.pid, host.arena.folder) as watch:
        await asyncio.to_thread(producer.tell, "build")
        for step in range(1, sizes.repeats + 1):
            await port.publish_head(fence, version(step), encode(host.again(first, step)))
            await asyncio.to_thread(producer.tell, step)
    producer.close()
    await port.close()
    models = 3 if can_pack(torch.bfloat16, torch.device("cpu")) else 2
    return watch.anonymous - models * layout.nbytes


class Watch:
    """The most that a process takes beyond what it took at the beginning, and that lies in a folder of segments."""

    def __init__(self, pid: int, folder: Path) -> None:
        self._status, self._folder = Path(f"/proc/{pid}/status"), folder
        self._first = self._private()
        self.anonymous = self.shared = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(SAMPLE_S):
            self.anonymous = max(self.anonymous, self._private() - self._first)
            blocks = {found.st_ino: found.st_blocks for found in self._files()}
            self.shared = max(self.shared, 512 * sum(blocks.values()))

    def _files(self) -> list[os.stat_result]:
        found = []
        for file in self._folder.iterdir():
            try:
                found.append(file.stat())
            except FileNotFoundError:
                continue
        return found

    def _private(self) -> int:
        for line in self._status.read_text().splitlines():
            if line.startswith("RssAnon:"):
                return 1024 * int(line.split()[1])
        raise AssertionError(f"{self._status} says nothing of RssAnon")


class Engine:
    """An engine's real weights, without decoding."""

    def __init__(self, nbytes: int) -> None:
        with torch.device("meta"):
            model: Any = LlamaForCausalLM(llama(nbytes)).bfloat16()
        model.to_empty(device="cpu").eval()
        model.tie_weights()
        # As the real one does: what one thread frees, another one's part of the heap does not get.
        self._preparing = ThreadPoolExecutor(1)
        self._weights = self._preparing.submit(EngineWeights, model).result()
        self.layout = Layout.of(layout_of(model, "bfloat16"))
        self.version: PolicyVersion | None = None

    def back_buffer(self, layout: Layout) -> Bytes:
        return self._weights.stage(layout)

    async def commit(self, version: PolicyVersion) -> float:
        prepared = await asyncio.get_running_loop().run_in_executor(self._preparing, self._weights.prepare)
        self._weights.swap(prepared)
        prepared.free()
        self.version = version
        return 0.0


def producer_process(pipe: Pipe, url: str, folder: Path, nbytes: int) -> None:
    pipe.send(None)
    pipe.recv()
    engine = Engine(nbytes)
    asyncio.run(_receive(pipe, url, Host(folder, "host"), "producer", engine))


def receiver_process(pipe: Pipe, url: str, folder: Path, name: str, layout: Layout) -> None:
    asyncio.run(_receive(pipe, url, Host(folder, "host"), name, BareEngine(layout)))


async def _receive(pipe: Pipe, url: str, host: Host, name: str, engine: Any) -> None:
    """Told a step, it answers how many versions it has committed once that one is."""
    port, committed = connect_run(url, RUN_ID), asyncio.Condition()

    def has(step: int) -> bool:
        return engine.version is not None and engine.version.step >= step

    async def told() -> None:
        while (step := await asyncio.to_thread(pipe.recv)) is not None:
            async with committed:
                await committed.wait_for(partial(has, step))
            pipe.send(receiver.stats().commits)

    class Telling:
        """The engine, which tells of its commits."""

        version = property(lambda self: engine.version)
        back_buffer = staticmethod(engine.back_buffer)

        async def commit(self, version: PolicyVersion) -> float:
            spent: float = await engine.commit(version)
            async with committed:
                committed.notify_all()
            return spent

    receiver = Receiver(
        port, Telling(), name, host.name, run_id=RUN_ID, lease_s=WeightsConfig().lease_s,
        share=WeightsConfig().staging_share, transport=ShmTransport(host.name, host.arena),
    )  # fmt: skip
    stopping = asyncio.Event()
    task = asyncio.create_task(receiver.run(stopping))
    task.add_done_callback(partial(_tell_of_failure, pipe))
    as_service()
    pipe.send(None)
    await told()
    stopping.set()
    await task
    await port.close()


def _tell_of_failure(pipe: Pipe, task: asyncio.Task[None]) -> None:
    """Whoever waits for an answer learns that there will be none."""
    if error := task.exception():
        print(repr(error), file=sys.stderr)
        pipe.close()


def trainer_process(pipe: Pipe, url: str, folder: Path, layout: Layout) -> None:
    asyncio.run(_train(pipe, url, Host(folder, "host"), layout))


async def _train(pipe: Pipe, url: str, host: Host, layout: Layout) -> None:
    """Has its parameters; told a step, it publishes them."""
    port = connect_run(url, RUN_ID)
    tensors = {spec.name: torch.rand(shape_of(spec, 0, 1)) for spec in layout.tensors}
    async with publishing(port, host, layout) as publisher:
        as_service()
        pipe.send(None)
        while (step := await asyncio.to_thread(pipe.recv)) is not None:
            await publisher.publish(version(step), tensors)
            await publisher.sealed()
            pipe.send(None)
    await port.close()


@asynccontextmanager
async def publishing(port: Run, host: Host, layout: Layout) -> AsyncIterator[Publisher]:
    fence = await port.take_fence(0)
    publisher = Publisher(port, fence, layout, RUN_ID, LIVE_VERSIONS, host=host.name, arena=host.arena)
    try:
        yield publisher
    finally:
        await publisher.close()


def stopped_peer(sizes: Sizes) -> dict[str, Figure]:
    """stopped_peer_commits and stopped_peer_skipped."""
    layout = model_layout(sizes.relay_bytes)
    found = []
    for stop in (False, True):
        with shared_folder() as folder, redis_run() as url:
            found.append(asyncio.run(_publish(Host(folder, "host"), folder, url, layout, sizes.publishes, stop=stop)))
    (before, skipped_before), (commits, skipped) = found
    return {
        "stopped_peer_commits": Figure(commits, "", before, commits / before, 1.0),
        "stopped_peer_skipped": Figure(skipped - skipped_before, "versions", bar=0.0, at_most=True),
    }


async def _publish(host: Host, folder: Path, url: str, layout: Layout, count: int, *, stop: bool) -> tuple[int, int]:
    """Commits of two receivers, and skipped versions, while a third one stands still or does not."""
    port = connect_run(url, RUN_ID)
    receivers = [Process(receiver_process, url, folder, f"receiver-{n}", layout) for n in range(RECEIVERS)]
    last, *others = receivers
    tensors = {spec.name: torch.rand(shape_of(spec, 0, 1)) for spec in layout.tensors}
    async with publishing(port, host, layout) as publisher:
        as_service()
        await publisher.publish(version(1), tensors)
        await _committed(receivers, 1)
        commits = 0
        for step in range(2, count + 2):
            if not await publisher.publish(version(step), tensors):
                continue
            committing = asyncio.create_task(_committed(others, step))
            if stop and step == 2:
                await _stop(port, last, "receiver-0", committing)
            commits = await committing
        if stop:
            os.kill(last.pid, signal.SIGCONT)
        assert publisher.stats().published > 1
        await _committed([last], publisher.stats().published + publisher.stats().skipped)
        skipped = publisher.stats().skipped
    for receiver in receivers:
        receiver.close()
    await port.close()
    return commits, skipped


async def _committed(receivers: list[Process], step: int) -> int:
    """How many versions these have committed, once all of them have this one."""
    return sum(await asyncio.gather(*(asyncio.to_thread(receiver.tell, step) for receiver in receivers)))


async def _stop(port: Run, process: Process, name: str, committing: asyncio.Task[int]) -> None:
    """Stop a process while it reads a version, where it does so for long enough to be seen."""
    while not committing.done() and not any(  # noqa: ASYNC110 - a lease wakes nobody
        name in holders for holders in (await port.leased()).values()
    ):
        await asyncio.sleep(LOOK_S)
    os.kill(process.pid, signal.SIGSTOP)
