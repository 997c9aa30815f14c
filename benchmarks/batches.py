"""What packing costs and saves in a training step, on one core, and what log-probs of many tokens need of memory.

    figure                  bar    what is divided by what
    padding_waste           0.05   positions computed beyond the tokens of the rollouts, in all computed; at most
    tokens_vs_dense         0.90   tokens/s of a step on a long-tailed mix of lengths, over those of full dense batches
    computed_vs_rollouts    -      positions computed, over the tokens of the rollouts with their prompts counted each
    logprob_peak_vs_naive   0.25   peak memory of forward and backward, over that of log_softmax of all logits; at most
    recomputed_peak         -      what a step keeps for its backward pass with activation checkpointing, over without

SmolLM2-135M with float32 master weights, autocast as `trainer.autocast = "auto"` decides. The mix: groups of 8 with
prompts of 40 to 50 tokens and completions of 4 to 768 tokens, log-normal with a median of 60. The dense batch is the
same model with transformers' own attention, rows of 256 tokens without any padding, as many tokens and as many of them
in the loss, the same clipping and optimizer. Medians of interleaved repeats. Peaks are those of a process of their own:
4,096 tokens, a vocabulary of 49,152, float32.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.report import Figure, arguments, report
from benchmarks.trainer import seconds
from broker.messages import Group, Trajectory, VersionSpan
from consumers.packing import Sample, pack
from consumers.trainer import Trainer
from headrace.config import Config
from headrace.config_trainer import TrainerConfig
from headrace.policy.activations import recompute_activations
from headrace.policy.blocks import Block
from headrace.policy.loading import load_model
from headrace.policy.logprobs import chosen_logprobs, packed_logprobs
from headrace.policy.memory import keep_freed_memory
from headrace.policy.packed_attention import use_packed_attention
from headrace.policy.prepare import resolve_model
from headrace.telemetry.phases import Lane
from headrace.version import PolicyVersion

BARS = {"padding_waste": 0.05, "tokens_vs_dense": 0.90, "logprob_peak_vs_naive": 0.25}
GROUPS, GROUP_SIZE = 6, 8
MEDIAN, SIGMA, SHORTEST, LONGEST = 60, 1.0, 4, 768
SMALLEST_VOCABULARY = 2000
DENSE_LENGTH = 256
PEAK_TOKENS, PEAK_VOCABULARY = 4096, 49_152


def workload(seed: int = 0) -> list[Group]:
    """Groups of random tokens with the lengths that the module's docstring names."""
    random = np.random.default_rng(seed)
    made = []
    for index in range(GROUPS):
        prompt = random.integers(100, SMALLEST_VOCABULARY, int(random.integers(40, 51)))
        lengths = np.clip(random.lognormal(np.log(MEDIAN), SIGMA, GROUP_SIZE), SHORTEST, LONGEST).astype(int)
        members = tuple(
            _rollout(prompt, random.integers(100, SMALLEST_VOCABULARY, length), member)
            for member, length in enumerate(lengths)
        )
        made.append(Group(f"t{index}", 1, "train", "random", index, "benchmark", members))
    return made


def _rollout(prompt: np.ndarray[Any, Any], completion: np.ndarray[Any, Any], member: int) -> Trajectory:
    tokens = np.concatenate([prompt, completion]).astype(np.int32)
    mask = np.arange(tokens.size) >= prompt.size
    spans = (VersionSpan(prompt.size, tokens.size, PolicyVersion(1, 0)),)
    return Trajectory(tokens, np.where(mask, -10.0, 0.0).astype(np.float32), mask, spans, float(member % 2), "stop")


class DenseStep:
    """A step on full rows: nothing is padded, nothing is shared, and the attention is the library's."""

    def __init__(self, model: Any, tokens: int, targets: int, budget: int, *, autocast: bool) -> None:
        self._model, self._autocast = model, autocast
        self._device = next(model.parameters()).device
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        rows = max(1, round(tokens / DENSE_LENGTH))
        self.tokens = rows * DENSE_LENGTH
        ids = torch.randint(100, SMALLEST_VOCABULARY, (rows, DENSE_LENGTH), device=self._device)
        self._ids = torch.split(ids, max(1, budget // DENSE_LENGTH))
        self._kept = targets // rows

    def run(self) -> float:
        total = 0.0
        for ids_BT in self._ids:
            with torch.autocast(self._device.type, torch.bfloat16, enabled=self._autocast):
                logits_BTV = self._model(input_ids=ids_BT, use_cache=False, logits_to_keep=self._kept + 1).logits
            targets_N = ids_BT[:, -self._kept :].flatten()
            loss = -chosen_logprobs(logits_BTV[:, :-1].flatten(0, 1), targets_N).mean()
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return total


def steps(load: Callable[[], Any], repeats: int, config: TrainerConfig) -> dict[str, Figure]:
    """Figures of whole training steps of the model that `load` returns, in float32."""
    groups, model = workload(), load()
    trainer = Trainer(model, Config(trainer=config), Lane("trainer", "bench"))
    trainer.train(groups, 0, 1)  # the first one builds kernels and optimizer state
    computed = [0]
    hook = model.get_input_embeddings().register_forward_hook(lambda _, given, __: _count(computed, given[0]))
    trainer.train(groups, 0, 1)
    hook.remove()
    packed, targets = counts(groups, config)
    dense = DenseStep(load(), packed, targets, config.token_budget, autocast=trainer.autocast)
    dense.run()
    spent: dict[str, list[float]] = {"packed": [], "dense": []}
    for _ in range(repeats):
        spent["packed"].append(seconds(lambda: trainer.train(groups, 0, 1)))
        spent["dense"].append(seconds(dense.run))
    rate = packed / statistics.median(spent["packed"])
    full = dense.tokens / statistics.median(spent["dense"])
    padding = computed[0] - packed
    whole = sum(t.token_ids_T.size for group in groups for t in group.trajectories)
    share = padding / computed[0]
    return {
        "padding_waste": Figure(padding, "positions", computed[0], share, BARS["padding_waste"], at_most=True),
        "tokens_vs_dense": Figure(rate, "tokens/s", full, rate / full, BARS["tokens_vs_dense"]),
        "computed_vs_rollouts": Figure(computed[0], "positions", whole, computed[0] / whole),
    }


def counts(groups: list[Group], config: TrainerConfig) -> tuple[int, int]:
    """Tokens that packing leaves of these groups, and how many of them enter the loss."""
    rows = pack([[Sample(t, 1.0) for t in group.trajectories] for group in groups], config.token_budget)
    return sum(row.token_ids_T.size for row in rows), sum(row.targets_N.size for row in rows)


def _count(total: list[int], ids: torch.Tensor) -> None:
    total[0] += ids.numel()


def all_targets(device: str) -> tuple[Any, tuple[Any, ...]]:
    """A model that is little but a head of the size that matters, and a row of which each token enters the loss."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=PEAK_VOCABULARY,
        hidden_size=576,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    model: Any = LlamaForCausalLM(config)
    model.to(device)
    use_packed_attention(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    ids_T = torch.randint(0, PEAK_VOCABULARY, (PEAK_TOKENS + 1,), device=device)
    # Rollouts of 128 tokens: what attention needs is next to nothing.
    blocks = tuple(Block(at, 0, (128,)) for at in range(0, PEAK_TOKENS, 128))
    places_T = torch.arange(PEAK_TOKENS, device=device)
    return model, (ids_T[:-1], places_T % 128, blocks, places_T, ids_T[1:])


def forward_backward(model: Any, columns: tuple[Any, ...], kind: str) -> None:
    """Log-probs of all targets, and their gradient, "ours" or "naive"."""
    ids_T, positions_T, blocks, sources_N, targets_N = columns
    if kind == "ours":
        logprobs_N = packed_logprobs(model, ids_T, positions_T, blocks, sources_N, targets_N, 1.0)
    else:
        out = model(input_ids=ids_T[None], position_ids=positions_T[None], packed_blocks=blocks, use_cache=False)
        logprobs_N = torch.log_softmax(out.logits[0].float(), -1).gather(1, targets_N[:, None])[:, 0]
    (-logprobs_N.mean()).backward()  # type: ignore[no-untyped-call]


def peak(kind: str) -> int:
    """Bytes that forward and backward of all log-probs took at their peak; run in a process of its own."""
    torch.set_num_threads(1)
    model, columns = all_targets("cpu")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = _kib("VmRSS")
    forward_backward(model, columns, kind)
    return (_kib("VmHWM") - before) << 10


def kept(kind: str) -> int:
    """Bytes that a row's forward pass keeps for its backward pass."""
    torch.set_num_threads(1)
    model = smollm2()
    if kind == "recomputed":
        recompute_activations(model)
    use_packed_attention(model)
    ids_T = torch.randint(0, SMALLEST_VOCABULARY, (1024,))
    blocks = tuple(Block(at, 0, (128,)) for at in range(0, 1024, 128))
    sources_N = torch.arange(0, 1024, 128)
    before = _kib("VmRSS")
    logprobs_N = packed_logprobs(model, ids_T, torch.arange(1024) % 128, blocks, sources_N, ids_T[sources_N], 1.0)
    used = (_kib("VmRSS") - before) << 10
    logprobs_N.sum().backward()  # type: ignore[no-untyped-call]
    return used


def _kib(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field + ":"))


def smollm2() -> Any:
    return load_model(resolve_model("smollm2"), "float32")


def memory() -> dict[str, Figure]:
    """Figures of peaks, each measured in a process of its own."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as pool:
        ours, naive = pool.map(peak, ("ours", "naive"))
        recomputed, plain = pool.map(kept, ("recomputed", "plain"))
    return {
        "logprob_peak_vs_naive": Figure(
            ours / 1e6, "MB", naive / 1e6, ours / naive, BARS["logprob_peak_vs_naive"], at_most=True
        ),
        "recomputed_peak": Figure(recomputed / 1e6, "MB", plain / 1e6, recomputed / plain),
    }


def main(argv: list[str]) -> int:
    parser = arguments(__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--repeats", type=int, default=3, help="interleaved repeats of each (default 3)")
    given = parser.parse_args(argv)
    if hasattr(os, "sched_setaffinity"):  # one core: threads of the interpreter must not borrow another
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    figures = memory()
    keep_freed_memory()
    figures = steps(smollm2, given.repeats, TrainerConfig(group_size=GROUP_SIZE)) | figures
    return report("batches, one core", figures, json_file=given.json, check=given.check)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
