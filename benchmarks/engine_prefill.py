"""How long running sequences wait while a long prompt enters the cache: for `benchmarks/engine.py`.

A prompt of 4,096 tokens arrives while all slots but one decode. Measured is the longest step until its first token,
over the median of the steps before it, in seconds of the decode thread's own processor time: others on the machine
lengthen single steps far more than a prompt does. Beside it stands the same where each step takes `prefill_budget`
tokens, whatever they cost.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from pathlib import Path

import numpy as np

from benchmarks.report import Figure
from headrace.version import PolicyVersion
from producers.engines.api import Request, SamplingParams
from producers.engines.torch_engine import TorchEngine

PROMPT = 4096
ROOM = 600
"""Tokens of the other sequences, which outlast the prompt."""
STEPS_BEFORE = 24
BAR = 4.0


async def gap_figure(folder: Path, slots: int, repeats: int, dtype: str) -> Figure:
    """In steps; the bar is the most that it may be."""
    chunked = await _longest(folder, slots, repeats, dtype, {})
    unpaced = await _longest(folder, slots, 1, dtype, {"prefill_gap": 1e9})
    return Figure(statistics.median(chunked), "steps", statistics.median(unpaced), bar=BAR, at_most=True)


async def _longest(folder: Path, slots: int, repeats: int, dtype: str, options: dict[str, float]) -> list[float]:
    """Of each repeat."""
    engine = TorchEngine(
        folder,
        slots=slots,
        context_length=PROMPT + ROOM,
        dtype=dtype,
        device="cpu",
        threads=1,
        **options,  # type: ignore[arg-type]
    )
    await engine.start()
    await engine.commit(PolicyVersion(1, 0))
    steps: list[tuple[float, int]] = []
    turn = engine.loop.turn

    def timed() -> None:
        before, prompts = time.thread_time(), engine.stats().prefill_tokens
        turn()
        steps.append((time.thread_time() - before, engine.stats().prefill_tokens - prompts))

    engine.loop.turn = timed  # type: ignore[method-assign]
    gaps = [await _one(engine, slots, repeat, steps) for repeat in range(repeats)]
    await engine.close()
    return gaps


async def _one(engine: TorchEngine, slots: int, repeat: int, steps: list[tuple[float, int]]) -> float:
    random = np.random.default_rng(repeat)

    def ask(name: str, length: int, new: int) -> asyncio.Task[object]:
        prompt_ids = random.integers(100, 40_000, length).astype(np.int32)
        request = Request(f"{name}#{repeat}", prompt_ids, SamplingParams(max_new_tokens=new, seed=repeat))
        return asyncio.create_task(engine.generate(request))

    running = [ask(f"r{index}", 40, ROOM) for index in range(slots - 1)]
    begun = len(steps)
    while sum(not prompts for _, prompts in steps[begun:]) < STEPS_BEFORE:  # noqa: ASYNC110 - as below
        await asyncio.sleep(0.01)
    before = [seconds for seconds, prompts in steps[begun:] if not prompts]
    arrived = len(steps)
    await ask("long", PROMPT, 1)
    longest = max(seconds for seconds, prompts in steps[arrived:] if prompts)
    for call in running:
        call.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    while engine.stats().busy_slots > 0:  # noqa: ASYNC110 - an engine wakes nobody when a slot is free
        await asyncio.sleep(0.01)
    return longest / statistics.median(before)
