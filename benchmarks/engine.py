"""The torch engine on one core, against its own full static decode steps and against transformers' `generate`.

    figure                    bar    what is divided by what
    occupancy                 0.95   slots that hold a sequence, over slots
    tokens_vs_static_steps    0.65   tokens/s with prefill and refilling, over tokens/s of full static decode steps
    decode_steps_vs_static    0.95   seconds of a static decode step, over those of the engine's steps without prefill
    tokens_vs_generate        3      tokens/s, over those of `generate` in static batches of the same size
    tokens_vs_prefill_bound   -      tokens/s, over those with static steps and prompts that cost only their products
    roofline_fraction         -      seconds to read weights and live cache once, over those of a decode step
    prefill_gap_steps         ≤ 4    longest step while a prompt of 4,096 tokens arrives, over a decode step's median

SmolLM2-135M in bfloat16; 256 prompts of 32 to 48 tokens; seeded completion lengths, most 16 to 32, one in eight 256;
end-of-text ignored. The engine is measured from its start until its queue is empty, which is when slots can no
longer be refilled. A static step is the same forward pass, cache, sampler and packed weights with all slots decoding
and nothing to schedule; a few of them run every 16 steps of the engine, at the contexts that its slots
have then, and are taken out of its time. `generate` runs whole batches of the same prompts, each as long as its
longest completion. The plain name of a figure is the worst of all sizes.

tokens_vs_prefill_bound says how much of tokens_vs_static_steps could be reached at all: static steps for the sampled
tokens, and for the prompt tokens nothing but their matrix products at the rate that this core reaches in this run.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.engine_prefill import gap_figure
from benchmarks.report import Figure, arguments, report
from headrace.policy.loading import load_model
from headrace.policy.memory import keep_freed_memory
from headrace.policy.prepare import resolve_model
from headrace.policy.sampling import RowSettings, sample
from headrace.version import PolicyVersion
from producers.engines.api import Request, SamplingParams
from producers.engines.decode_loop import StepTotals, Swap
from producers.engines.model_runner import ModelRunner
from producers.engines.torch_engine import TorchEngine
from producers.engines.weights import EngineWeights

BARS: dict[str, float | None] = {
    "occupancy": 0.95,
    "tokens_vs_static_steps": 0.65,
    "decode_steps_vs_static": 0.95,
    "tokens_vs_generate": 3.0,
    "tokens_vs_prefill_bound": None,
    "roofline_fraction": None,
}
CONTEXT = 320
LONG = 256
STATIC_STEPS = 3
STATIC_EVERY = 16
"""Engine steps between two visits to the static steps: counted in steps, so that both meet the same machine."""
DTYPE = "bfloat16"
FIRST = PolicyVersion(1, 0)


@dataclass(frozen=True, slots=True)
class EngineRun:
    """One run of the engine until its queue was empty."""

    tokens: int
    prompt_tokens: int
    seconds: float
    occupancy: float
    decode_step_s: float
    """Wall time of a step without prompt tokens, scheduling and sampling included."""
    static_step_s: float
    """Wall time of the static steps that ran in between."""
    mean_context: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


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
        model: Any = load_model(folder, DTYPE)
        self.bytes = sum(parameter.nbytes for parameter in model.parameters())
        embedding: torch.Tensor = model.get_input_embeddings().weight
        self.flops_per_prompt_token = 2 * (sum(one.numel() for one in model.parameters()) - embedding.numel())
        self._runner = ModelRunner(model, slots, CONTEXT)
        self._weights = EngineWeights(model)
        self._random = np.random.default_rng(0)
        self.kv_bytes_per_token = self._runner.kv_bytes_per_token

    def seconds(self, contexts: list[int]) -> list[float]:
        """Seconds of each of a few steps that follow one another, a first one left out."""
        slots = len(contexts)
        slots_B, lengths_B = np.arange(slots), np.minimum(contexts, CONTEXT - STATIC_STEPS)
        rows = RowSettings(np.ones(slots), np.ones(slots), np.zeros(slots, np.int64))
        tokens_B = self._random.integers(100, 40_000, slots)
        taken = []
        for step in range(STATIC_STEPS):
            start = time.perf_counter()
            logits_BV = self._runner.forward(slots_B, lengths_B + step, [], tokens_B, slots_B)
            tokens_B, _ = sample(logits_BV, rows, self._random.random(slots))
            taken.append(time.perf_counter() - start)
        for slot in range(slots):
            self._runner.table.release(slot)
        return taken[1:]


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
    """Bytes per second that one core reads from memory: a sum over 512 MiB."""
    words = torch.ones(1 << 26, dtype=torch.int64)
    return words.nbytes / _seconds(words.sum)


def product_rate() -> float:
    """Floating-point operations per second of one core in bfloat16 products of a prompt chunk's size."""
    x, weight = torch.randn(256, 576).bfloat16(), torch.randn(1536, 576).bfloat16()
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    seconds = _seconds(lambda: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], ""), repeats=50)
    return 2 * x.numel() * weight.shape[0] / seconds


def _seconds(call: Callable[[], object], repeats: int = 5) -> float:
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


async def run_engine(engine: TorchEngine, requests: list[Request], static: StaticSteps) -> EngineRun:
    """Hand over all requests at once; measure until none waits for a slot, then drop what still runs."""
    static_s: list[float] = []
    between = Swap(FIRST, lambda: static_s.extend(static.seconds(engine.loop.contexts())))
    before, swapped = _totals(engine), engine.lane.seconds()["swap"]
    start = time.perf_counter()
    open_calls = [asyncio.create_task(engine.generate(request)) for request in requests]
    await asyncio.sleep(0.1)
    due = engine.stats().decode_steps + STATIC_EVERY // 2
    while engine.stats().waiting > 0:
        await asyncio.sleep(0.01)
        if engine.stats().decode_steps >= due:
            engine.loop.send(between)
            due += STATIC_EVERY
    wall, after, swap_s = time.perf_counter() - start, _totals(engine), engine.lane.seconds()["swap"] - swapped
    for call in open_calls:
        call.cancel()
    await asyncio.gather(*open_calls, return_exceptions=True)
    while engine.stats().busy_slots > 0:  # noqa: ASYNC110 - as above
        await asyncio.sleep(0.01)
    pure, mixed = (_difference(one, other) for one, other in zip(after, before, strict=True))
    decode_rows = pure.rows + mixed.rows - mixed.finished_prompts
    return EngineRun(
        tokens=pure.rows + mixed.rows,
        prompt_tokens=mixed.prompt_tokens,
        seconds=wall - swap_s,
        occupancy=(pure.occupied + mixed.occupied) / (pure.steps + mixed.steps) / engine.slots,
        decode_step_s=(wall - swap_s - mixed.seconds) / pure.steps,
        static_step_s=statistics.mean(static_s),
        mean_context=(pure.context_tokens + mixed.context_tokens) / decode_rows,
    )


def _totals(engine: TorchEngine) -> tuple[StepTotals, StepTotals]:
    return replace(engine.loop.pure), replace(engine.loop.mixed)


def _difference(after: StepTotals, before: StepTotals) -> StepTotals:
    return StepTotals(**{one.name: getattr(after, one.name) - getattr(before, one.name) for one in fields(StepTotals)})


async def measure(folder: Path, slots: int, repeats: int, prompts: int) -> dict[str, Figure]:
    """All figures of one batch size."""
    requests = workload(prompts)
    engine = TorchEngine(folder, slots=slots, context_length=CONTEXT, dtype=DTYPE, device="cpu", threads=1)
    await engine.start()
    await engine.commit(FIRST)
    static, generate = StaticSteps(folder, slots), Generate(folder)
    warm_up = [replace(one, sampling=SamplingParams(max_new_tokens=24)) for one in requests[: 3 * slots]]
    await run_engine(engine, warm_up, static)
    ratios: dict[str, list[Figure]] = {name: [] for name in BARS}
    for repeat in range(repeats):
        run = await run_engine(engine, requests, static)
        first = repeat * slots % prompts
        generate_tps = generate.tokens_per_s(requests[first : first + slots])
        for name, figure in figures_of(slots, run, static, generate_tps).items():
            ratios[name].append(figure)
        print(
            f"{slots} slots, repeat {repeat + 1}: engine {run.tokens_per_s:.0f} tokens/s, decode step "
            f"{run.decode_step_s * 1e3:.1f} ms, static step {run.static_step_s * 1e3:.1f} ms, "
            f"generate {generate_tps:.0f} tokens/s, mean context {run.mean_context:.0f}",
            file=sys.stderr,
        )
    await engine.close()
    return {name: _median(repeated) for name, repeated in ratios.items()}


def figures_of(slots: int, run: EngineRun, static: StaticSteps, generate_tps: float) -> dict[str, Figure]:
    """The figures of one repeat."""
    static_tps = slots / run.static_step_s
    prompt_s = run.prompt_tokens * static.flops_per_prompt_token / product_rate()
    bound_tps = run.tokens / (run.tokens / static_tps + prompt_s)
    step_bytes = static.bytes + slots * run.mean_context * static.kv_bytes_per_token
    pairs = {
        "tokens_vs_static_steps": (run.tokens_per_s, static_tps, "tokens/s"),
        "decode_steps_vs_static": (1 / run.decode_step_s, 1 / run.static_step_s, "steps/s"),
        "tokens_vs_generate": (run.tokens_per_s, generate_tps, "tokens/s"),
        "tokens_vs_prefill_bound": (run.tokens_per_s, bound_tps, "tokens/s"),
        "roofline_fraction": (1 / run.decode_step_s, read_bandwidth() / step_bytes, "steps/s"),
    }
    figures = {
        name: Figure(value, unit, baseline, value / baseline, BARS[name])
        for name, (value, baseline, unit) in pairs.items()
    }
    return {"occupancy": Figure(run.occupancy, "", bar=BARS["occupancy"]), **figures}


def _measured(figure: Figure) -> float:
    return figure.value if figure.ratio is None else figure.ratio


def _median(repeated: list[Figure]) -> Figure:
    """The repeat in the middle, by what its bar is about."""
    return sorted(repeated, key=_measured)[len(repeated) // 2]


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
        figures[name] = min(sizes.values(), key=_measured)
        figures |= {f"{name}_{slots}": figure for slots, figure in sizes.items()}
    figures["prefill_gap_steps"] = asyncio.run(gap_figure(folder, min(options.slots), options.repeats, DTYPE))
    return report("torch engine, SmolLM2-135M, one core", figures, json_file=options.json, check=options.check)


if __name__ == "__main__":
    sys.exit(main())
