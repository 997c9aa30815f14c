"""Engine "sglang" against a bare client: the same prompts, the same server, the same concurrency.

    figure             bar    what is divided by what
    producer_overhead  0.97   tokens/s through the engine, over those of a bare asynchronous client
    client_cpu         -      CPU seconds of this process for 1,000 tokens, engine over bare client

One SGLang server decodes for both. The bare client is aiohttp with a semaphore: it sends ids, asks for log-probs, and
parses the answer; so does the engine, which also chooses servers, books versions and watches the server. A round is
bare, engine, engine, bare; the figure is the median of the rounds' ratios.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import numpy as np

from benchmarks.report import Figure, arguments, report
from headrace.policy.prepare import resolve_model
from headrace.version import PolicyVersion
from producers.engines.api import Request, SamplingParams
from producers.engines.sglang.client import SglangClient
from producers.engines.sglang.engine import KEY_VARIABLE, SglangEngine
from producers.engines.sglang.launch import LaunchSpec, Server
from producers.engines.sglang.options import Options

BARS: dict[str, float | None] = {"producer_overhead": 0.97, "client_cpu": None}
CPU_ARGS = (
    "--device cpu --attention-backend torch_native --sampling-backend pytorch --disable-overlap-schedule "
    "--cuda-graph-backend-decode=disabled --cuda-graph-backend-prefill=disabled --mem-fraction-static 0.7 "
    "--max-total-tokens 32768 --sleep-on-idle --disable-radix-cache"
)
CPU_ENV = {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def workload(count: int, new: int, vocabulary: int, seed: int = 0) -> list[Request]:
    """`count` prompts of 32 to 48 random tokens, with completions of half to all of `new` tokens."""
    random = np.random.default_rng(seed)
    requests = []
    for index in range(count):
        prompt = random.integers(3, vocabulary, int(random.integers(32, 49))).astype(np.int32)
        length = int(random.integers(new // 2, new + 1))
        requests.append(
            Request(f"task{index // 4}/{index % 4}/0#{index}", prompt, SamplingParams(max_new_tokens=length))
        )
    return requests


def vocabulary_of(folder: Path) -> int:
    return int(json.loads((folder / "config.json").read_text("utf-8"))["vocab_size"])


@dataclass(slots=True)
class Side:
    """What one of the two has done so far."""

    tokens: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0

    async def add(self, work: Coroutine[None, None, int]) -> None:
        """`work` returns its tokens."""
        wall, cpu = time.perf_counter(), time.process_time()
        self.tokens += await work
        self.wall_s += time.perf_counter() - wall
        self.cpu_s += time.process_time() - cpu

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.wall_s

    @property
    def cpu_per_1000(self) -> float:
        return 1000 * self.cpu_s / self.tokens


async def through_engine(engine: SglangEngine, requests: Sequence[Request]) -> int:
    """Tokens."""
    return sum(len(one.token_ids_N) for one in await asyncio.gather(*map(engine.generate, requests)))


async def bare(url: str, key: str, requests: Sequence[Request], concurrency: int) -> int:
    """Tokens of a client that knows nothing but the route."""
    slots = asyncio.Semaphore(concurrency)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, headers={"Authorization": f"Bearer {key}"}) as session:

        async def ask(request: Request) -> int:
            params = {"max_new_tokens": request.sampling.max_new_tokens, "temperature": 1.0, "ignore_eos": True}
            # What a model's own generation_config.json may say otherwise would cost time.
            params |= {"top_p": 1.0, "top_k": -1}
            body = {"input_ids": request.prompt_ids_P.tolist(), "sampling_params": params, "return_logprob": True}
            async with slots, session.post(f"{url}/generate", json=body) as response:
                return len(json.loads(await response.read())["output_ids"])

        return sum(await asyncio.gather(*(ask(request) for request in requests)))


async def measure(
    server: Server, folder: Path, concurrency: int, rounds: int, requests: list[Request]
) -> dict[str, Figure]:
    os.environ[KEY_VARIABLE] = server.admin_key
    engine = SglangEngine(folder, Options(urls=(server.url,)), slots=concurrency, context_length=512)
    await engine.start()
    await engine.commit(PolicyVersion(1, 0))
    played: list[tuple[Side, Side]] = []
    try:
        await bare(server.url, server.admin_key, requests[:concurrency], concurrency)
        for number in range(rounds):
            ours, theirs = Side(), Side()
            # What the machine does beside this, and how that changes, meets both.
            for side in (theirs, ours, ours, theirs):
                if side is ours:
                    await side.add(through_engine(engine, requests))
                else:
                    await side.add(bare(server.url, server.admin_key, requests, concurrency))
            speeds = f"engine {ours.tokens_per_s:.1f}, bare {theirs.tokens_per_s:.1f} tokens/s"
            print(f"round {number + 1}: {speeds}", file=sys.stderr)
            played.append((ours, theirs))
    finally:
        await engine.close()
    return {
        "producer_overhead": _median(
            "producer_overhead", "tokens/s", [(ours.tokens_per_s, theirs.tokens_per_s) for ours, theirs in played]
        ),
        "client_cpu": _median("client_cpu", "s", [(ours.cpu_per_1000, theirs.cpu_per_1000) for ours, theirs in played]),
    }


def _median(name: str, unit: str, pairs: list[tuple[float, float]]) -> Figure:
    """The round in the middle, by its ratio."""
    ours, theirs = sorted(pairs, key=lambda pair: pair[0] / pair[1])[len(pairs) // 2]
    return Figure(ours, unit, theirs, ours / theirs, BARS[name])


async def run(
    folder: Path, python: str, args: Sequence[str], concurrency: int, rounds: int, new: int
) -> dict[str, Figure]:
    spec = LaunchSpec(folder, python, (*args, "--max-running-requests", str(concurrency)), CPU_ENV)
    server = Server(spec, "benchmark")
    try:
        async with SglangClient(server.url, server.admin_key) as client:
            await server.ready(client)
        return await measure(server, folder, concurrency, rounds, workload(2 * concurrency, new, vocabulary_of(folder)))
    finally:
        await server.close()


def main() -> int:
    parser = arguments(__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--python", default=".servers/sglang/bin/python", help="interpreter that has SGLang")
    parser.add_argument("--model", default="smollm2", help="folder of the model")
    parser.add_argument("--server-args", default=CPU_ARGS, help="of sglang.launch_server; the default is for a CPU")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=64, help="longest completion")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    if not Path(options.python).exists():
        print(f"no SGLang: {options.python} is missing; name its interpreter with --python", file=sys.stderr)
        return int(options.check)
    figures = asyncio.run(
        run(
            resolve_model(options.model),
            options.python,
            options.server_args.split(),
            options.concurrency,
            options.rounds,
            options.tokens,
        )
    )
    return report("engine sglang against a bare client", figures, json_file=options.json, check=options.check)


if __name__ == "__main__":
    sys.exit(main())
