"""The trainer's step on one core, against the matrix products in it and against a plain transformers step.

    figure                  bar    what is divided by what
    matmul_fraction         0.6    FLOP/s of the step's matrix products in its whole time, over those of them alone
    tokens_vs_plain         3      tokens/s of rollouts, over those of a padded batch through transformers' attention
    step_seconds            -      one whole step: packing, forward, backward, clipping, AdamW
    mismatch_bf16           -      mean difference of log-probs under autocast from float32, nats

SmolLM2-135M with float32 master weights, autocast as `trainer.autocast = "auto"` decides; 8 groups of 8 rollouts,
prompts of 40 to 50 tokens that their group shares, 4 to 12 new tokens. The products alone are each of the model's
linear layers forward and backward at the packed number of tokens. The plain step takes two of the groups,
right-padded, each rollout with its prompt, and the same clipping and optimizer. Medians of interleaved repeats.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.report import Figure, arguments, report
from broker.messages import Group, Trajectory, VersionSpan
from consumers.packing import Row, Sample, pack
from consumers.trainer import Trainer
from headrace.config import Config
from headrace.config_trainer import TrainerConfig
from headrace.policy.loading import load_model
from headrace.policy.logprobs import chosen_logprobs, packed_logprobs
from headrace.policy.memory import keep_freed_memory
from headrace.policy.prepare import resolve_model
from headrace.telemetry.phases import Lane
from headrace.version import PolicyVersion

BARS: dict[str, float | None] = {
    "matmul_fraction": 0.6,
    "tokens_vs_plain": 3.0,
    "step_seconds": None,
    "mismatch_bf16": None,
}
GROUPS, GROUP_SIZE, PLAIN_GROUPS = 8, 8, 2
VOCABULARY = 40_000


def workload(seed: int = 0) -> list[Group]:
    """Groups of random tokens with the lengths that the module's docstring names."""
    return [_group(np.random.default_rng([seed, index]), index) for index in range(GROUPS)]


def _group(random: np.random.Generator, index: int) -> Group:
    prompt = random.integers(100, VOCABULARY, int(random.integers(40, 51)))
    members = []
    for member in range(GROUP_SIZE):
        new = int(random.integers(4, 13))
        tokens = np.concatenate([prompt, random.integers(100, VOCABULARY, new)]).astype(np.int32)
        mask = np.arange(tokens.size) >= prompt.size
        spans = (VersionSpan(prompt.size, tokens.size, PolicyVersion(1, 0)),)
        logprobs = np.where(mask, -10.0, 0.0).astype(np.float32)
        members.append(Trajectory(tokens, logprobs, mask, spans, float(member % 2), "stop"))
    return Group(f"t{index}", 1, "train", "random", index, "benchmark", tuple(members))


class PlainStep:
    """The same work as one would write it at first: every rollout whole, padded, all logits of its new tokens."""

    def __init__(self, autocast: bool) -> None:
        self.model = load_model(resolve_model("smollm2"), "float32")
        self._autocast = autocast
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)

    def run(self, groups: list[Group]) -> None:
        members = [trajectory for group in groups for trajectory in group.trajectories]
        longest = max(one.token_ids_T.size for one in members)
        ids_BT = torch.zeros(len(members), longest, dtype=torch.int64)
        mask_BT, loss_BT = torch.zeros_like(ids_BT), torch.zeros_like(ids_BT, dtype=torch.bool)
        for row, one in enumerate(members):
            size = one.token_ids_T.size
            ids_BT[row, :size] = torch.from_numpy(one.token_ids_T)
            mask_BT[row, :size] = 1
            loss_BT[row, :size] = torch.from_numpy(one.loss_mask_T)
        with torch.autocast("cpu", torch.bfloat16, enabled=self._autocast):
            hidden = self.model.model(input_ids=ids_BT, attention_mask=mask_BT, use_cache=False).last_hidden_state
            logits_NV = self.model.lm_head(hidden[:, :-1][loss_BT[:, 1:]])
        logprobs_N = chosen_logprobs(logits_NV, ids_BT[loss_BT])
        (-logprobs_N.mean()).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)


class Products:
    """The matrix products of one step, and nothing else."""

    def __init__(self, model: Any, rows: list[Row], dtype: torch.dtype) -> None:
        tokens = sum(row.token_ids_T.size for row in rows)
        targets = sum(row.targets_N.size for row in rows)
        self._operands = []
        self.flops = 0
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear):
                count = targets if name == "lm_head" else tokens
                weight = module.weight.detach().to(dtype)
                x = torch.randn(count, weight.shape[1]).to(dtype)
                self._operands.append((x, weight, torch.randn(count, weight.shape[0]).to(dtype)))
                self.flops += 6 * count * weight.numel()

    def run(self) -> None:
        for x, weight, _ in self._operands:
            torch.mm(x, weight.t())
        for x, weight, grad in self._operands:
            torch.mm(grad, weight)
            torch.mm(grad.t(), x)


def mismatch(model: Any, rows: list[Row]) -> float:
    """Mean absolute difference of log-probs between autocast and float32, nats."""
    differences = []
    for row in rows:
        inputs = [torch.from_numpy(x) for x in (row.token_ids_T, row.positions_T, row.sources_N, row.targets_N)]
        results = []
        for enabled in (True, False):
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                ids, positions, sources, targets = inputs
                results.append(packed_logprobs(model, ids, positions, row.blocks, sources, targets, 1.0))
        differences.append((results[0] - results[1]).abs())
    return float(torch.cat(differences).mean())


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main(argv: list[str]) -> int:
    parser = arguments(__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--repeats", type=int, default=3, help="interleaved repeats of each (default 3)")
    given = parser.parse_args(argv)
    if hasattr(os, "sched_setaffinity"):  # one core: threads of the interpreter must not borrow another
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    keep_freed_memory()
    groups = workload()
    model = load_model(resolve_model("smollm2"), "float32")
    trainer = Trainer(model, Config(trainer=TrainerConfig(group_size=GROUP_SIZE)), Lane("trainer", "bench"))
    rows = pack([[Sample(t, 1.0) for t in group.trajectories] for group in groups], TrainerConfig().token_budget)
    products = Products(model, rows, torch.bfloat16 if trainer.autocast else torch.float32)
    plain = PlainStep(trainer.autocast)
    few = groups[:PLAIN_GROUPS]
    difference = mismatch(model, rows)

    works: dict[str, Callable[[], object]] = {
        "step": lambda: trainer.train(groups, 0, 1),
        "products": products.run,
        "plain": lambda: plain.run(few),
    }
    measured: dict[str, list[float]] = {name: [] for name in works}
    for repeat in range(given.repeats + 1):
        for name, work in works.items():
            spent = seconds(work)
            if repeat:  # the first one builds kernels and optimizer state
                measured[name].append(spent)
    medians = {name: statistics.median(spent) for name, spent in measured.items()}
    tokens, few_tokens = (sum(t.token_ids_T.size for g in some for t in g.trajectories) for some in (groups, few))
    figures = {
        "matmul_fraction": Figure(
            products.flops / medians["step"] / 1e9,
            "GFLOP/s",
            products.flops / medians["products"] / 1e9,
            medians["products"] / medians["step"],
            BARS["matmul_fraction"],
        ),
        "tokens_vs_plain": Figure(
            tokens / medians["step"],
            "tokens/s",
            few_tokens / medians["plain"],
            (tokens / medians["step"]) / (few_tokens / medians["plain"]),
            BARS["tokens_vs_plain"],
        ),
        "step_seconds": Figure(medians["step"], "s"),
        "mismatch_bf16": Figure(difference, "nats"),
    }
    return report("trainer, one core", figures, json_file=given.json, check=given.check)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
