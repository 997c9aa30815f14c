"""What only a GPU can tell, in eight minutes of one CUDA device. `--device cpu --small` shows that all of it runs.

    figure                  bar    what is divided by what
    packed_mismatch         1e-3   largest difference of log-probs in float32, packed from one by one, nats; at most
    tokens_vs_dense         0.90   tokens/s of a training step on a long-tailed mix, over those of full dense batches
    padding_waste           0.05   positions computed beyond the tokens of the rollouts, in all computed; at most
    matmul_fraction         -      FLOP/s of that step, over those of a product of large square matrices
    step_peak_vs_dense      -      peak memory of that step, over that of the dense one
    logprob_peak_vs_naive   0.25   peak memory of the log-probs of 4,096 tokens, over log_softmax of all logits; at most
    decode_vs_memory        -      tokens/s of the embedded engine, over those at which its weights can be read
    engine_mismatch         0.05   mean difference of the engine's log-probs from the trainer's, nats; at most
    load_vs_copy            -      bytes/s of a version from host memory into the engine, over a copy from pinned memory
    broadcast               -      bytes/s of the device's torch.distributed backend, between two devices if there are

A random Llama of 0.4 billion parameters; float32 master weights, the rest in bfloat16. Peaks and copies need a GPU.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from benchmarks import batches
from benchmarks.report import Figure, arguments, report
from broker.messages import Group, Trajectory, VersionSpan
from consumers.packing import Row, Sample, pack
from consumers.trainer import Trainer
from headrace.config import Config
from headrace.config_trainer import TrainerConfig
from headrace.policy.intensity import measured
from headrace.policy.loading import layout_of, load_model
from headrace.policy.logprobs import packed_logprobs
from headrace.policy.packed_attention import use_packed_attention
from headrace.telemetry.phases import Lane
from headrace.version import PolicyVersion
from producers.engines.api import Completion, Request, SamplingParams
from producers.engines.torch_engine import TorchEngine
from weightsync.manifest import Layout

BARS = {"packed_mismatch": 1e-3, "logprob_peak_vs_naive": 0.25, "engine_mismatch": 0.05}
FIRST = PolicyVersion(1, 0)
DTYPE = "bfloat16"


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of the model, and of what is done with it."""

    hidden: int = 1024
    layers: int = 24
    heads: int = 16
    vocabulary: int = 49_152
    budget: int = 16_384
    repeats: int = 5
    slots: int = 128
    new_tokens: int = 256
    broadcast_bytes: int = 1 << 30


SMALL = Sizes(64, 2, 4, 2000, 2048, 1, 4, 8, 1 << 20)


class Bench:
    """One model in a folder, on one device."""

    def __init__(self, device: str, sizes: Sizes, folder: Path) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM
        from transformers.utils import logging as transformers_logging

        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=sizes.vocabulary,
            hidden_size=sizes.hidden,
            intermediate_size=3 * sizes.hidden,
            num_hidden_layers=sizes.layers,
            num_attention_heads=sizes.heads,
            num_key_value_heads=sizes.heads // 2,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
        )
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        model: Any = LlamaForCausalLM(config)
        model.to(torch.bfloat16).save_pretrained(folder)
        self.device, self.sizes, self.folder = device, sizes, folder
        self.cuda = device.startswith("cuda")

    def load(self) -> Any:
        return load_model(self.folder, "float32", self.device)

    @contextmanager
    def peak(self) -> Iterator[Callable[[], int]]:
        """What is allocated at most from here on, beyond what there is; a GPU only."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield lambda: torch.cuda.max_memory_allocated() - before

    # -- training

    def packed_mismatch(self) -> dict[str, Figure]:
        model = self.load()
        group = [Sample(trajectory, 1.0) for trajectory in batches.workload()[0].trajectories]
        (row, *_) = pack([group], self.sizes.budget)
        expected = torch.cat([self._alone(model, sample.trajectory) for sample in group])
        use_packed_attention(model)
        with torch.no_grad():
            ids_T, positions_T, sources_N, targets_N = self._columns(row)
            found = packed_logprobs(model, ids_T, positions_T, row.blocks, sources_N, targets_N, 1.0)
        worst = float((found.cpu() - expected[: found.numel()]).abs().max())
        return {"packed_mismatch": Figure(worst, "nats", bar=BARS["packed_mismatch"], at_most=True)}

    def _columns(self, row: Row) -> list[torch.Tensor]:
        columns = (row.token_ids_T, row.positions_T, row.sources_N, row.targets_N)
        return [torch.from_numpy(column).to(self.device) for column in columns]

    def _alone(self, model: Any, one: Trajectory) -> torch.Tensor:
        ids_T = torch.from_numpy(one.token_ids_T.astype(np.int64)).to(self.device)
        with torch.no_grad():
            logits_TV = model(input_ids=ids_T[None], use_cache=False).logits[0]
        logprobs_T = torch.log_softmax(logits_TV[:-1], -1).gather(1, ids_T[1:, None])[:, 0]
        return logprobs_T[torch.from_numpy(one.loss_mask_T[1:])].cpu()

    def steps(self) -> dict[str, Figure]:
        config = TrainerConfig(group_size=batches.GROUP_SIZE, token_budget=self.sizes.budget, autocast="bfloat16")
        figures = batches.steps(self.load, self.sizes.repeats, config)
        groups, model = batches.workload(), self.load()
        trainer = Trainer(model, Config(trainer=config), lane := Lane("trainer", "bench"))
        trainer.train(groups, 0, 1)
        before = lane.done()
        start = time.perf_counter()
        trainer.train(groups, 1, 1)
        spent = time.perf_counter() - start
        flop = sum(after.flop for after in lane.done().values()) - sum(one.flop for one in before.values())
        roofline = measured(self.device, DTYPE)
        figures["matmul_fraction"] = Figure(
            flop / spent / 1e12, "TFLOP/s", roofline.flop_per_s / 1e12, flop / spent / roofline.flop_per_s
        )
        if self.cuda:
            with self.peak() as most:
                trainer.train(groups, 2, 1)
                ours = most()
            dense = batches.DenseStep(self.load(), *batches.counts(groups, config), config.token_budget, autocast=True)
            dense.run()
            with self.peak() as most:
                dense.run()
                full = most()
            figures["step_peak_vs_dense"] = Figure(ours / 1e9, "GB", full / 1e9, ours / full)
        return figures

    def logprob_peak(self) -> dict[str, Figure]:
        if not self.cuda:
            return {}
        taken = {}
        for kind in ("ours", "naive"):
            model, columns = batches.all_targets(self.device)
            with self.peak() as most:
                batches.forward_backward(model, columns, kind)
                taken[kind] = most()
            del model
        ratio = taken["ours"] / taken["naive"]
        bar = BARS["logprob_peak_vs_naive"]
        return {
            "logprob_peak_vs_naive": Figure(taken["ours"] / 1e6, "MB", taken["naive"] / 1e6, ratio, bar, at_most=True)
        }

    # -- the engine

    async def engine(self) -> dict[str, Figure]:
        sizes = self.sizes
        engine = TorchEngine(
            self.folder, slots=sizes.slots, context_length=1024, dtype=DTYPE, device=self.device, threads=1
        )
        await engine.start()
        await engine.commit(FIRST)
        await self._generate(engine, sizes.slots)
        start = time.perf_counter()
        completions = await self._generate(engine, 2 * sizes.slots)
        spent = time.perf_counter() - start
        tokens = sum(one.token_ids_N.size for _, one in completions)
        loading = await self._loading(engine)
        await engine.close()
        model = self.load()
        nbytes = 2 * sum(parameter.numel() for parameter in model.parameters())
        limit = sizes.slots * measured(self.device, DTYPE).bytes_per_s / nbytes
        group = Group("t", 1, "train", "random", 0, "benchmark", tuple(_trajectory(*one) for one in completions))
        config = TrainerConfig(token_budget=sizes.budget, autocast="bfloat16")
        result = Trainer(model, Config(trainer=config), Lane("trainer", "bench")).train([group], 0, 1)
        mismatch = dict(result.drift.measured())["mismatch"]
        return {
            "decode_vs_memory": Figure(tokens / spent, "tokens/s", limit, tokens / spent / limit),
            "engine_mismatch": Figure(mismatch, "nats", bar=BARS["engine_mismatch"], at_most=True),
            **loading,
        }

    async def _generate(self, engine: TorchEngine, count: int) -> list[tuple[Request, Completion]]:
        random = np.random.default_rng(count)
        sampling = SamplingParams(self.sizes.new_tokens)
        prompts = [random.integers(100, batches.SMALLEST_VOCABULARY, 48).astype(np.int32) for _ in range(count)]
        requests = [Request(f"r{index}", prompt, sampling) for index, prompt in enumerate(prompts)]
        return list(zip(requests, await asyncio.gather(*map(engine.generate, requests)), strict=True))

    async def _loading(self, engine: TorchEngine) -> dict[str, Figure]:
        """A version that lies in host memory becomes the engine's."""
        layout = Layout.of(layout_of(load_model(self.folder, DTYPE), DTYPE))
        data = np.zeros(layout.nbytes, np.uint8)
        spent, copied = [], []
        for step in range(1, self.sizes.repeats + 2):
            start = time.perf_counter()
            np.copyto(engine.back_buffer(layout)[: data.size], data)
            await engine.commit(PolicyVersion(1, step))
            spent.append(time.perf_counter() - start)
            if self.cuda:
                pinned = torch.empty(layout.nbytes, dtype=torch.uint8, pin_memory=True)
                start = time.perf_counter()
                pinned.to(self.device)
                torch.cuda.synchronize()
                copied.append(time.perf_counter() - start)
        rate = layout.nbytes / statistics.median(spent[1:]) / 1e9
        limit = layout.nbytes / statistics.median(copied[1:]) / 1e9 if copied else None
        return {"load_vs_copy": Figure(rate, "GB/s", limit, rate / limit if limit else None)}

    # -- between processes

    def broadcast(self) -> dict[str, Figure]:
        ranks = min(2, torch.cuda.device_count()) if self.cuda else 2
        if ranks == 1:
            print("broadcast: nccl joins no two processes on one device; alone it only says that it works here")
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "rate"
            spawn(  # type: ignore[no-untyped-call]
                _rank, (ranks, f"file://{folder}/store", self.device, self.sizes.broadcast_bytes, file), ranks
            )
            rate = float(file.read_text())
        return {"broadcast": Figure(rate / 1e9, "GB/s")}


def _trajectory(request: Request, completion: Completion) -> Trajectory:
    tokens = np.concatenate([request.prompt_ids_P, completion.token_ids_N]).astype(np.int32)
    size = request.prompt_ids_P.size
    logprobs = np.concatenate([np.zeros(size, np.float32), completion.logprobs_N])
    spans = (VersionSpan(size, tokens.size, FIRST),)
    reward = float(request.request_id[-1] in "02468")
    return Trajectory(tokens, logprobs, np.arange(tokens.size) >= size, spans, reward, completion.finish_reason)


def _rank(rank: int, ranks: int, store: str, device: str, nbytes: int, file: Path) -> None:
    """One process of the group."""
    cuda = device.startswith("cuda")
    if cuda:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if cuda else "gloo", init_method=store, rank=rank, world_size=ranks)
    data = torch.zeros(nbytes, dtype=torch.uint8, device="cuda" if cuda else "cpu")
    spent = []
    for _ in range(4):
        start = time.perf_counter()
        dist.broadcast(data, 0)
        if cuda:
            torch.cuda.synchronize()
        spent.append(time.perf_counter() - start)
    if rank == 0:
        file.write_text(str(nbytes / min(spent)))
    dist.destroy_process_group()


def main(argv: list[str]) -> int:
    parser = arguments(__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", default="cuda:0", help="(default cuda:0)")
    parser.add_argument("--small", action="store_true", help="a tiny model, to see that all runs")
    given = parser.parse_args(argv)
    if given.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(
            "torch finds no CUDA device here; --device cpu --small runs the same on the CPU, to see that it does"
        )
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    torch.set_num_threads(1)
    figures: dict[str, Figure] = {}
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(given.device, SMALL if given.small else Sizes(), Path(folder))
        parts = (
            bench.packed_mismatch,
            bench.steps,
            bench.logprob_peak,
            lambda: asyncio.run(bench.engine()),
            bench.broadcast,
        )
        for part in parts:
            start = time.perf_counter()
            found = part()
            figures |= found
            print(f"{', '.join(found) or 'nothing'}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    name = torch.cuda.get_device_name(given.device) if bench.cuda else "the CPU"
    return report(f"on {name}", figures, json_file=given.json, check=given.check)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
