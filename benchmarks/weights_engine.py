"""What decoding feels of new weights: the swap itself, the gap between two tokens, and staging beside it."""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from benchmarks.broker import create
from benchmarks.report import Figure
from benchmarks.weights_world import (
    RUN_ID,
    Host,
    Sizes,
    as_service,
    layout_on_wire,
    llama,
    model_layout,
    p99,
    random_bytes,
    seconds,
    shared_folder,
    touched,
    version,
)
from broker.connect import connect_run
from headrace.config import WeightsConfig
from headrace.policy.loading import layout_of
from headrace.policy.prepare import resolve_model
from headrace.telemetry.phases import Lane
from producers.engines.api import Request, SamplingParams
from producers.engines.decode_loop import Swap
from producers.engines.torch_engine import TorchEngine
from producers.engines.weights import EngineWeights
from weightsync.commits import Commit
from weightsync.manifest import Layout, encode
from weightsync.receiver import Receiver
from weightsync.transports.shm import ShmTransport

NARROW_BYTES = 6_000_000
"""30 layers whose decode step is fast: what is left of a gap is not the step."""
SLOTS, CONTEXT = 4, 4096
STEPS_BETWEEN = 4
"""Decode steps between two commits, at least."""
STOPS = 5
GAP_S = 0.005


def swap(sizes: Sizes) -> dict[str, Figure]:
    """swap_ms."""
    model: Any = LlamaForCausalLM(llama(sizes.model_bytes))
    weights = EngineWeights(model.bfloat16().eval())
    parameters = [*model.parameters()]
    layout = Layout.of(layout_of(model, "bfloat16"))
    as_service()
    taken, bare = [], []
    for _ in range(sizes.swaps):
        weights.stage(layout)
        prepared = weights.prepare()
        taken.append(seconds(lambda prepared=prepared: weights.swap(prepared)))  # type: ignore[misc]
        prepared.free()
        bare.append(seconds(lambda: _rebind(parameters)))
    return {"swap_ms": Figure(1e3 * p99(taken), "ms", 1e3 * p99(bare), bar=1.0, at_most=True)}


def _rebind(parameters: list[torch.nn.Parameter]) -> None:
    """The least that a swap has to do."""
    for parameter in parameters:
        parameter.data = parameter.data


class Marks(Lane):
    """Notes when each decode step begins, and each swap."""

    def __init__(self) -> None:
        super().__init__("engine", "start")
        self.seen: list[tuple[float, str]] = []

    def enter(self, phase: str) -> None:
        self.seen.append((time.perf_counter(), phase))
        super().enter(phase)

    def enter_shared(self, shares: Sequence[tuple[str, float]]) -> None:
        self.seen.append((time.perf_counter(), "mixed"))
        super().enter_shared(shares)

    def wait(self) -> None:
        self.seen.append((time.perf_counter(), "wait"))
        super().wait()

    def intervals(self) -> tuple[list[float], list[float]]:
        """Seconds from one decode step to the next: with nothing, and with one swap between them."""
        steps = [index for index, (_, phase) in enumerate(self.seen) if phase == "decode"]
        plain: list[float] = []
        swapped: list[float] = []
        for first, second in pairwise(steps):
            between = {phase for _, phase in self.seen[first + 1 : second]}
            if between <= {"swap"}:
                (swapped if between else plain).append(self.seen[second][0] - self.seen[first][0])
        return plain, swapped


def gap(sizes: Sizes) -> dict[str, Figure]:
    """gap_steps, and the pause of stopping and copying beside it."""
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(_gap(narrow(Path(folder)), sizes))


async def _gap(folder: Path, sizes: Sizes) -> dict[str, Figure]:
    marks = Marks()
    async with decoding(folder, marks) as engine:
        layout = layout_on_wire(LlamaConfig.from_pretrained(folder))
        as_service()
        for step in range(1, sizes.commits + 1):
            engine.back_buffer(layout)
            await engine.commit(version(step))
            await _steps(engine, STEPS_BETWEEN)
        plain, swapped = marks.intervals()
        stopped = await _stop_and_copy(engine, model_layout(sizes.model_bytes).nbytes)
    step_s = statistics.median(plain)
    gap_s = p99([max(0.0, spent - step_s) for spent in swapped])
    noise_s = p99([max(0.0, spent - step_s) for spent in plain])
    allowed = max(step_s, GAP_S)
    pause = 1e3 * statistics.median(stopped)
    return {
        "gap_steps": Figure(gap_s / step_s, "steps", allowed / step_s, gap_s / allowed, 1.0, at_most=True),
        "gap_ms": Figure(1e3 * gap_s, "ms", 1e3 * noise_s),
        "decode_step_ms": Figure(1e3 * step_s, "ms"),
        "gap_vs_stop_all": Figure(1e3 * gap_s, "ms", pause, 1e3 * gap_s / pause),
    }


async def _stop_and_copy(engine: TorchEngine, nbytes: int) -> list[float]:
    """Seconds for which decoding stands still where all stop, take the whole model, and go on."""
    out, data = touched(nbytes), touched(nbytes)
    taken: list[float] = []
    for _ in range(STOPS):
        before = len(taken)
        assert engine.version is not None
        engine.loop.send(Swap(engine.version, lambda: taken.append(seconds(lambda: np.copyto(out, data)))))
        while len(taken) == before:  # noqa: ASYNC110 - the decode thread wakes nobody
            await asyncio.sleep(0.001)
        await _steps(engine, STEPS_BETWEEN)
    return taken


def staging(sizes: Sizes) -> dict[str, Figure]:
    """staging_slowdown."""
    with tempfile.TemporaryDirectory() as folder, shared_folder() as memory:
        model = resolve_model(sizes.staged) if sizes.staged else narrow(Path(folder))
        beside, alone = asyncio.run(_windows(model, Host(memory, "host"), sizes))
    with_staging, without = statistics.median(beside), statistics.median(alone)
    slowdown = 1 - with_staging / without
    return {"staging_slowdown": Figure(with_staging, "steps/s", without, slowdown, 0.15, at_most=True)}


async def _windows(folder: Path, host: Host, sizes: Sizes) -> tuple[list[float], list[float]]:
    """Decode steps per second, with versions staged one after the other and without, in turn."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[1:] or cores)
    await create("memory:staging", RUN_ID)
    port = connect_run("memory:staging", RUN_ID)
    fence, layout = await port.take_fence(0), layout_on_wire(LlamaConfig.from_pretrained(folder))
    commits: asyncio.Queue[Commit] = asyncio.Queue()
    beside, alone = [], []
    async with decoding(folder) as engine:
        _pin("headrace-decode", cores[0])
        receiver = Receiver(
            port, engine, "producer", host.name, run_id=RUN_ID, share=WeightsConfig().staging_share,
            transport=ShmTransport(host.name, host.arena), on_commit=commits.put_nowait,
        )  # fmt: skip
        stopping = asyncio.Event()
        task = asyncio.create_task(receiver.run(stopping))
        first, step = host.publish(layout, 1, random_bytes(layout.nbytes)), 1
        as_service()
        for _ in range(sizes.repeats):
            alone.append(await _rate(engine, asyncio.sleep(sizes.window_s)))
            until = time.perf_counter() + sizes.window_s

            async def stage(until: float = until) -> None:
                nonlocal step
                while time.perf_counter() < until:
                    step += 1
                    await port.publish_head(fence, version(step), encode(host.again(first, step)))
                    await commits.get()
                    host.free(first.version)

            beside.append(await _rate(engine, stage()))
        stopping.set()
        await task
    await port.close()
    return beside, alone


async def _rate(engine: TorchEngine, meanwhile: Any) -> float:
    start, before = time.perf_counter(), engine.stats().decode_steps
    await meanwhile
    return (engine.stats().decode_steps - before) / (time.perf_counter() - start)


def _pin(thread: str, core: int) -> None:
    (number,) = (one.native_id for one in threading.enumerate() if one.name == thread)
    assert number is not None
    os.sched_setaffinity(number, {core})


@asynccontextmanager
async def decoding(folder: Path, lane: Lane | None = None) -> AsyncIterator[TorchEngine]:
    """An engine all of whose slots decode for longer than anything here takes."""
    engine = TorchEngine(folder, slots=SLOTS, context_length=CONTEXT, dtype="auto", device="cpu", threads=1)
    engine.lane = lane or engine.lane
    await engine.start()
    await engine.commit(version(0))
    tasks = [asyncio.create_task(_decode(engine, slot)) for slot in range(SLOTS)]
    try:
        await _steps(engine, 2 * STEPS_BETWEEN)
        yield engine
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await engine.close()


async def _decode(engine: TorchEngine, slot: int) -> None:
    request = Request(f"r{slot}", np.arange(1, 9, dtype=np.int32), SamplingParams(max_new_tokens=CONTEXT, seed=slot))
    while True:
        await engine.generate(request)


async def _steps(engine: TorchEngine, count: int) -> None:
    """Wait for so many decode steps."""
    until = engine.stats().decode_steps + count
    while engine.stats().decode_steps < until:  # noqa: ASYNC110 - as above
        await asyncio.sleep(0.001)


def narrow(folder: Path) -> Path:
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    LlamaForCausalLM(llama(NARROW_BYTES)).save_pretrained(folder)
    return folder
