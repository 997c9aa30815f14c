"""Engine "sglang" against a bare client: the same prompts, the same server, the same concurrency.

    figure             bar    what is divided by what
    producer_overhead  0.97   tokens/s through the engine, over those of a bare asynchronous client

One SGLang server decodes for both. The bare client is aiohttp with a semaphore: it sends ids, asks for log-probs, and
parses the answer; so does the engine, which also chooses servers, books versions and watches the server. Rounds of the
two are interleaved, in turn first one and then the other begins; the figure is the median of the pairs' ratios.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import statistics
import sys
import time
from collections.abc import Sequence
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

BARS: dict[str, float | None] = {"producer_overhead": 0.97}
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


async def through_engine(engine: SglangEngine, requests: Sequence[Request]) -> float:
    """Tokens per second."""
    start = time.perf_counter()
    done = await asyncio.gather(*(engine.generate(request) for request in requests))
    return sum(len(one.token_ids_N) for one in done) / (time.perf_counter() - start)


async def bare(url: str, key: str, requests: Sequence[Request], concurrency: int) -> float:
    """Tokens per second of a client that knows nothing but the route."""
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

        start = time.perf_counter()
        tokens = await asyncio.gather(*(ask(request) for request in requests))
        return sum(tokens) / (time.perf_counter() - start)


async def measure(server: Server, folder: Path, concurrency: int, rounds: int, requests: list[Request]) -> Figure:
    os.environ[KEY_VARIABLE] = server.admin_key
    engine = SglangEngine(folder, Options(urls=(server.url,)), slots=concurrency, context_length=512)
    await engine.start()
    await engine.commit(PolicyVersion(1, 0))
    ratios, ours, theirs = [], [], []
    try:
        await bare(server.url, server.admin_key, requests[:concurrency], concurrency)
        for number in range(rounds):
            pair: dict[str, float] = {}
            for side in ("engine", "bare") if number % 2 else ("bare", "engine"):
                if side == "engine":
                    pair[side] = await through_engine(engine, requests)
                else:
                    pair[side] = await bare(server.url, server.admin_key, requests, concurrency)
            print(f"round {number + 1}: engine {pair['engine']:.1f}, bare {pair['bare']:.1f} tokens/s", file=sys.stderr)
            ours.append(pair["engine"])
            theirs.append(pair["bare"])
            ratios.append(pair["engine"] / pair["bare"])
    finally:
        await engine.close()
    middle = statistics.median(ratios)
    bar = BARS["producer_overhead"]
    return Figure(statistics.median(ours), "tokens/s", statistics.median(theirs), middle, bar)


async def run(folder: Path, python: str, args: Sequence[str], concurrency: int, rounds: int, new: int) -> Figure:
    spec = LaunchSpec(folder, python, (*args, "--max-running-requests", str(concurrency)), CPU_ENV)
    server = Server(spec, "benchmark")
    try:
        async with SglangClient(server.url, server.admin_key) as client:
            await server.ready(client)
        return await measure(server, folder, concurrency, rounds, workload(4 * concurrency, new, vocabulary_of(folder)))
    finally:
        await server.close()


def main() -> int:
    parser = arguments(__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--python", default=".servers/sglang/bin/python", help="interpreter that has SGLang")
    parser.add_argument("--model", default="smollm2", help="folder of the model")
    parser.add_argument("--server-args", default=CPU_ARGS, help="of sglang.launch_server; the default is for a CPU")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64, help="longest completion")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    if not Path(options.python).exists():
        print(f"no SGLang: {options.python} is missing; name its interpreter with --python", file=sys.stderr)
        return int(options.check)
    figure = asyncio.run(
        run(
            resolve_model(options.model),
            options.python,
            options.server_args.split(),
            options.concurrency,
            options.rounds,
            options.tokens,
        )
    )
    figures = {"producer_overhead": figure}
    return report("engine sglang against a bare client", figures, json_file=options.json, check=options.check)


if __name__ == "__main__":
    sys.exit(main())
