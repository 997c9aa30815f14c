"""What recording costs: of a decode step, of a train step, and of a core for as long as a process lives.

    figure                bar     what is divided by what
    decode_step_share     0.01    seconds of a step's records and of the writer meanwhile, over the step's
    train_step_share      0.01    the same of a whole train step
    writer_share          0.01    seconds of writing all lanes of a producer, over those from one writing to the next
    records_per_decode    -       records of one decode step, and what one of them costs
    records_per_train     -       of one train step

A record is an entry of a phase, or of what was computed in it. Records are counted in the engine and the trainer as
they run, SmolLM2-135M at a batch of 32 and the workload of `benchmarks.trainer`; the cost of one is what its calls took
there, as a median. The writer writes as it does in a service: an engine that has changed its phase every few
milliseconds, beside lanes that are still in theirs.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.report import Figure, arguments, report
from benchmarks.trainer import GROUP_SIZE, workload
from consumers.forward import Forward
from consumers.packing import Row
from consumers.trainer import Trainer
from headrace.config import Config
from headrace.config_trainer import TrainerConfig
from headrace.policy.loading import load_model
from headrace.policy.memory import keep_freed_memory
from headrace.policy.prepare import resolve_model
from headrace.telemetry.journal import Journal
from headrace.telemetry.phases import Lane, Place
from headrace.telemetry.recorder import EVERY_S, Recorder
from headrace.version import PolicyVersion
from producers.engines.api import Request, SamplingParams
from producers.engines.torch_engine import TorchEngine

BARS: dict[str, float | None] = {
    "decode_step_share": 0.01,
    "train_step_share": 0.01,
    "writer_share": 0.01,
    "records_per_decode": None,
    "records_per_train": None,
}
SLOTS, PROMPT, NEW = 32, 24, 96
STILL = 8
"""Lanes of a producer beside its engine's: of the whole, and of reward workers."""
TICKS = 40


class Timed:
    """Calls a function, and keeps what each call took."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.taken: list[float] = []

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        start = time.perf_counter()
        try:
            return self._function(*arguments, **named)
        finally:
            self.taken.append(time.perf_counter() - start)


class TimedLane(Lane):
    """Times each of its own records."""

    def __init__(self, name: str) -> None:
        super().__init__(name, "bench", place=Place("device", "cpu", 1))
        self.timed = Timed(super().enter)

    def enter(self, phase: str) -> None:
        self.timed(phase)


async def decode() -> tuple[float, float, float]:
    """Seconds of a step in which all decode, records in it, and seconds of one record."""
    engine = TorchEngine(resolve_model("smollm2"), slots=SLOTS, context_length=PROMPT + NEW, device="cpu", threads=1)
    await engine.start()
    entering = Timed(engine.loop._enter)
    engine.loop._enter = entering  # type: ignore[method-assign]
    await engine.commit(PolicyVersion(1, 0))
    random = np.random.default_rng(0)
    prompts = [random.integers(100, 40_000, PROMPT).astype(np.int32) for _ in range(SLOTS)]
    sampling = SamplingParams(max_new_tokens=NEW, seed=0)
    await asyncio.gather(*(engine.generate(Request(f"r{n}", ids, sampling)) for n, ids in enumerate(prompts)))
    steps = engine.loop.pure
    await engine.close()
    return steps.seconds / steps.steps, 2.0, statistics.median(entering.taken[-steps.steps :]) / 2


def train(repeats: int) -> tuple[float, float, float]:
    """The same of a train step."""
    lane = TimedLane("trainer")
    model = load_model(resolve_model("smollm2"), "float32")
    trainer = Trainer(model, Config(trainer=TrainerConfig(group_size=GROUP_SIZE)), lane)
    trained = Timed(Forward.trained)

    def timed(self: Forward, row: Row) -> None:
        trained(self, row)

    Forward.trained = timed  # type: ignore[method-assign]
    groups, spent = workload(), []
    for repeat in range(repeats + 1):
        if repeat == 1:  # the first one builds kernels and optimizer state
            lane.timed.taken.clear()
            trained.taken.clear()
        start = time.perf_counter()
        trainer.train(groups, 0, 1)
        spent.append(time.perf_counter() - start)
    taken = lane.timed.taken + trained.taken
    return statistics.median(spent[1:]), len(taken) / repeats, statistics.median(taken)


def write() -> float:
    """Seconds of one writing of all lanes."""
    engine = Lane("engine", "start", place=Place("device", "cpu", 1))
    lanes = [engine, *(Lane(f"score/sums/{number}", "wait_rollout") for number in range(STILL))]
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder) / "p.jsonl")
        recorder = Recorder(journal.write, lanes)
        writing = Timed(recorder.tick)
        for _ in range(TICKS):
            for _ in range(8):
                engine.enter_shared([("prefill", 1.0), ("decode", 3.0)])
                engine.did("decode", 1e9, 1e8)
                time.sleep(0.001)
                engine.enter("decode")
                time.sleep(0.001)
            writing()
        journal.close()
    return statistics.median(writing.taken)


def main(argv: list[str]) -> int:
    parser = arguments(__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--repeats", type=int, default=5, help="train steps (default 5)")
    given = parser.parse_args(argv)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    keep_freed_memory()
    writer = write() / EVERY_S
    figures = {
        "writer_share": Figure(writer * EVERY_S * 1000, "ms", EVERY_S * 1000, writer, BARS["writer_share"], True)
    }
    works = {"decode": asyncio.run(decode()), "train": train(given.repeats)}
    for name, (step_s, records, record_s) in works.items():
        cost_s = records * record_s + writer * step_s
        figures[f"{name}_step_share"] = Figure(
            1000 * cost_s, "ms", 1000 * step_s, cost_s / step_s, BARS[f"{name}_step_share"], True
        )
        figures[f"records_per_{name}"] = Figure(records, f"of {1e6 * record_s:.1f} µs")
    ordered = {name: figures[name] for name in BARS}
    return report("the ledger, on one core", ordered, json_file=given.json, check=given.check)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
