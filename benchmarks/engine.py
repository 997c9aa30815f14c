"""The torch engine on one core, against its own full static decode steps and against transformers' `generate`.

    figure                    bar    what is divided by what
    occupancy                 0.95   slots that hold a sequence, over slots
    tokens_vs_static_steps    0.65   tokens/s with prefill and refilling, over tokens/s of full static decode steps
    decode_steps_vs_static    0.95   seconds of a static decode step, over those of the engine's steps without prefill
    tokens_vs_generate        3      tokens/s, over those of `generate` in static batches of the same size
    roofline_fraction         -      seconds to read weights and live cache once, over those of a decode step

SmolLM2-135M in bfloat16; 256 prompts of 32 to 48 tokens; seeded completion lengths, most 16 to 32, one in eight 256;
end-of-text ignored. The engine is measured from its start until its queue is empty, which is when slots can no
longer be refilled. A static step runs the same forward pass, cache, sampler and packed weights with all slots
decoding at the engine's mean context, and nothing to schedule. `generate` runs whole batches of the same prompts, each
as long as its longest completion. Medians of interleaved repeats; the plain name is the worst of all sizes.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.report import Figure, arguments, report
from headrace.policy.loading import load_model
from headrace.policy.memory import keep_freed_memory
from headrace.policy.prepare import resolve_model
from headrace.policy.sampling import RowSettings, sample
from headrace.version import PolicyVersion
from producers.engines.api import Request, SamplingParams
from producers.engines.decode_loop import StepTotals
from producers.engines.model_runner import ModelRunner
from producers.engines.torch_engine import TorchEngine
from producers.engines.weights import EngineWeights

BARS: dict[str, float | None] = {
    "occupancy": 0.95,
    "tokens_vs_static_steps": 0.65,
    "decode_steps_vs_static": 0.95,
    "tokens_vs_generate": 3.0,
    "roofline_fraction": None,
}
CONTEXT = 320
LONG = 256
STATIC_STEPS = 8
DTYPE = "bfloat16"


@dataclass(frozen=True, slots=True)
class EngineRun:
    """One run of the engine until its queue was empty."""

    tokens_per_s: float
    occupancy: float
    decode_step_s: float
    """Wall time of a step without prompt tokens, scheduling and sampling included."""
    mean_context: float


def workload(count: int, seed: int = 0) -> list[Request]:
    """`count` prompts of random tokens with the lengths that the module's docstring names."""
    random = np.random.default_rng(seed)
    requests = []
    for index in range(count):
        length = LONG if index % 8 == 3 else int(random.integers(16, 33))
        prompt_ids = random.integers(100, 40_000, int(random.integers(32, 49))).astype(np.int32)
        requests.append(Request(f"r{index}", prompt_ids, SamplingParams(max_new_tokens=length, seed=index)))
    order = random.permutation(count)
    return [requests[index] for index in order]


class StaticSteps:
    """Full decode steps without an engine: one forward pass and one sampling call, over and over."""

    def __init__(self, folder: Path, slots: int) -> None:
        model = load_model(folder, DTYPE)
        self.bytes = sum(parameter.nbytes for parameter in model.parameters())
        self._runner = ModelRunner(model, slots, CONTEXT)
        self._weights = EngineWeights(model)
        self._slots = slots
        self._random = np.random.default_rng(0)
        self._rows = RowSettings(np.ones(slots), np.ones(slots), np.zeros(slots, np.int64))
        self.kv_bytes_per_token = self._runner.kv_bytes_per_token

    def seconds(self, mean_context: float) -> list[float]:
        """Seconds of each of some steps. Contexts are spread evenly around the mean."""
        slots_B = np.arange(self._slots)
        spread = np.linspace(0.4, 1.6, self._slots) * mean_context
        lengths_B = np.clip(spread.astype(np.int64), 1, CONTEXT - STATIC_STEPS)
        tokens_B = self._random.integers(100, 40_000, self._slots)
        taken = []
        for step in range(STATIC_STEPS):
            start = time.perf_counter()
            logits_BV = self._runner.forward(slots_B, lengths_B + step, [], tokens_B, slots_B)
            tokens_B, _ = sample(logits_BV, self._rows, self._random.random(self._slots))
            taken.append(time.perf_counter() - start)
        for slot in range(self._slots):
            self._runner.table.release(slot)
        return taken


class Generate:
    """transformers' own `generate`, as it comes: static batches, left padding, sampling at temperature 1."""

    def __init__(self, folder: Path) -> None:
        self._model: Any = load_model(folder, DTYPE)

    def tokens_per_s(self, requests: list[Request]) -> float:
        """Wanted tokens per second of one batch, which runs as long as its longest completion."""
        longest = max(len(request.prompt_ids_P) for request in requests)
        ids = torch.full((len(requests), longest), 2)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(requests):
            ids[row, longest - len(request.prompt_ids_P) :] = torch.from_numpy(request.prompt_ids_P)
            mask[row, longest - len(request.prompt_ids_P) :] = 1
        new = max(request.sampling.max_new_tokens for request in requests)
        start = time.perf_counter()
        with torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=mask,
                do_sample=True,
                top_k=0,
                min_new_tokens=new,
                max_new_tokens=new,
                pad_token_id=2,
            )
        return sum(request.sampling.max_new_tokens for request in requests) / (time.perf_counter() - start)


def read_bandwidth() -> float:
    """Bytes per second that one core reads from memory: a sum over 512 MiB, the median of five."""
    words = torch.ones(1 << 26, dtype=torch.int64)
    taken = []
    for _ in range(5):
        start = time.perf_counter()
        words.sum()
        taken.append(time.perf_counter() - start)
    return words.nbytes / statistics.median(taken)


async def run_engine(engine: TorchEngine, requests: list[Request]) -> EngineRun:
    """Hand over all requests at once; measure until none waits for a slot, then drop what still runs."""
    before, lane_before = _totals(engine), engine.lane.seconds()
    start = time.perf_counter()
    open_calls = [asyncio.create_task(engine.generate(request)) for request in requests]
    await asyncio.sleep(0.1)
    while engine.stats().waiting > 0:  # noqa: ASYNC110 - the engine reports ends, not beginnings
        await asyncio.sleep(0.01)
    wall, after, lane = time.perf_counter() - start, _totals(engine), engine.lane.seconds()
    for call in open_calls:
        call.cancel()
    await asyncio.gather(*open_calls, return_exceptions=True)
    while engine.stats().busy_slots > 0:  # noqa: ASYNC110 - as above
        await asyncio.sleep(0.01)
    pure, mixed = (_difference(one, other) for one, other in zip(after, before, strict=True))
    steps = pure.steps + mixed.steps
    return EngineRun(
        tokens_per_s=(pure.rows + mixed.rows) / wall,
        occupancy=(pure.occupied + mixed.occupied) / steps / engine.slots,
        decode_step_s=(lane["decode"] - lane_before.get("decode", 0.0)) / pure.steps,
        mean_context=pure.context_tokens / pure.rows,
    )


def _totals(engine: TorchEngine) -> tuple[StepTotals, StepTotals]:
    return replace(engine.loop.pure), replace(engine.loop.mixed)


def _difference(after: StepTotals, before: StepTotals) -> StepTotals:
    return StepTotals(
        steps=after.steps - before.steps,
        seconds=after.seconds - before.seconds,
        rows=after.rows - before.rows,
        prompt_tokens=after.prompt_tokens - before.prompt_tokens,
        occupied=after.occupied - before.occupied,
        context_tokens=after.context_tokens - before.context_tokens,
    )


async def measure(folder: Path, slots: int, repeats: int, prompts: int) -> dict[str, Figure]:
    """All figures of one batch size."""
    requests = workload(prompts)
    engine = TorchEngine(folder, slots=slots, context_length=CONTEXT, dtype=DTYPE, device="cpu", threads=1)
    await engine.start()
    await engine.commit(PolicyVersion(1, 0))
    static, generate = StaticSteps(folder, slots), Generate(folder)
    warm_up = [replace(one, sampling=SamplingParams(max_new_tokens=4)) for one in requests[: 2 * slots]]
    context = (await run_engine(engine, warm_up)).mean_context
    runs: list[EngineRun] = []
    static_s, generate_tps, bandwidth = [], [], []
    for repeat in range(repeats):
        before = static.seconds(runs[-1].mean_context if runs else context)
        run = await run_engine(engine, requests)
        after = static.seconds(run.mean_context)
        runs.append(run)
        # The first repeat knows the context only afterwards.
        static_s.append(statistics.median([*before, *after] if len(runs) > 1 else after))
        first = repeat * slots % prompts
        generate_tps.append(generate.tokens_per_s(requests[first : first + slots]))
        bandwidth.append(read_bandwidth())
        print(
            f"{slots} slots, repeat {repeat + 1}: engine {run.tokens_per_s:.0f} tokens/s, decode step "
            f"{run.decode_step_s * 1e3:.1f} ms, static step {static_s[-1] * 1e3:.1f} ms, "
            f"generate {generate_tps[-1]:.0f} tokens/s, mean context {run.mean_context:.0f}",
            file=sys.stderr,
        )
    await engine.close()
    step_bytes = [static.bytes + slots * run.mean_context * static.kv_bytes_per_token for run in runs]
    return figures_of(slots, runs, static_s, generate_tps, [b / w for b, w in zip(step_bytes, bandwidth, strict=True)])


def figures_of(
    slots: int, runs: list[EngineRun], static_s: list[float], generate_tps: list[float], roofline_s: list[float]
) -> dict[str, Figure]:
    """Medians of the repeats' ratios, with the medians of what they divide."""
    tokens = [run.tokens_per_s for run in runs]
    steps = [run.decode_step_s for run in runs]
    static_tps = [slots / seconds for seconds in static_s]
    return {
        "occupancy": Figure(_median([run.occupancy for run in runs]), "", bar=BARS["occupancy"]),
        "tokens_vs_static_steps": _ratio("tokens_vs_static_steps", tokens, static_tps, "tokens/s"),
        "decode_steps_vs_static": _ratio(
            "decode_steps_vs_static", [1 / one for one in steps], [1 / one for one in static_s], "steps/s"
        ),
        "tokens_vs_generate": _ratio("tokens_vs_generate", tokens, generate_tps, "tokens/s"),
        "roofline_fraction": _ratio(
            "roofline_fraction", [1 / one for one in steps], [1 / one for one in roofline_s], "steps/s"
        ),
    }


def _ratio(name: str, values: list[float], baselines: list[float], unit: str) -> Figure:
    ratio = _median([value / baseline for value, baseline in zip(values, baselines, strict=True)])
    return Figure(_median(values), unit, _median(baselines), ratio, BARS[name])


def _median(values: list[float]) -> float:
    return statistics.median(values)


def main() -> int:
    parser = arguments(__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--slots", type=int, nargs="+", default=[32, 64], metavar="N")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=256)
    options = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):  # one core: threads of the interpreter must not borrow another
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    keep_freed_memory()
    folder = resolve_model("smollm2")
    by_size = {slots: asyncio.run(measure(folder, slots, options.repeats, options.prompts)) for slots in options.slots}
    figures: dict[str, Figure] = {}
    for name in BARS:
        sizes = {slots: one[name] for slots, one in by_size.items()}
        figures[name] = min(sizes.values(), key=lambda one: one.value if one.ratio is None else one.ratio)
        figures |= {f"{name}_{slots}": figure for slots, figure in sizes.items()}
    return report("torch engine, SmolLM2-135M, one core", figures, json_file=options.json, check=options.check)


if __name__ == "__main__":
    sys.exit(main())
