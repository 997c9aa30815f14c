"""The trainer: float32 master weights, one optimizer step per batch. Synchronous; one thread calls it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from broker.messages import Group
from consumers.advantages import advantage
from consumers.losses import Denominators, LossSettings, LossTokens, loss
from consumers.packing import Row, Sample, pack
from headrace.config import Config, TrainerConfig
from headrace.policy.dtype import compute_dtype
from headrace.policy.intensity import measured, observe, shape_of
from headrace.policy.logprobs import packed_logprobs
from headrace.policy.packed_attention import use_packed_attention
from headrace.telemetry.arithmetic import Roofline, block_contexts
from headrace.telemetry.phases import Lane

PROBE_ROWS = 512
"""Most rows of the product that decides about autocast."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one optimizer step did."""

    loss: float
    grad_norm: float
    """Before clipping; 0 when there was no backward pass."""
    reward: float
    """Mean over rollouts."""
    accuracy: float | None
    """Share of right ones among the rollouts that say whether they are; None when none does."""
    rollouts: int
    without_advantage: int
    """Rollouts left out of the backward pass, because their group's rewards are all equal."""
    tokens: int
    """Tokens of all rollouts, prompts included, as if each had been computed alone."""
    packed_tokens: int
    """Tokens that were computed."""
    loss_tokens: int
    mismatch: float
    """Mean absolute difference of log-probs between policy and sampler over the trained tokens (nats)."""
    clipped: float
    """Share of the trained tokens whose importance ratio is outside the clip range."""
    skipped: str
    """Why the optimizer did not move; empty when it did."""


class Trainer:
    """Model, optimizer, and what a step does with a batch of groups."""

    def __init__(self, model: Any, config: Config, lane: Lane) -> None:
        """`model` is a transformers causal LM with float32 parameters.

        Raises ConfigError for an unknown advantage or loss, ModelError when the model cannot share prompts.
        """
        self._config: TrainerConfig = config.trainer
        self._temperature = config.sampling.temperature
        self._max_tokens = config.sampling.max_new_tokens
        self._advantage = advantage(config.trainer.advantage)
        self._loss = loss(config.trainer.loss)
        self._settings = LossSettings.of(config.trainer)
        self._lane = lane
        self._model = model
        self._device = next(model.parameters()).device
        self._shape = shape_of(model)
        use_packed_attention(model)
        lane.place.device = str(self._device)
        observe(lane, str(self._device))
        self.autocast = autocast(config.trainer, model, str(self._device))
        self.optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=config.trainer.learning_rate,
            betas=config.trainer.adam_betas,
            weight_decay=config.trainer.weight_decay,
            fused=True,
        )

    def parameters(self) -> dict[str, torch.Tensor]:
        """Name to float32 master weight, tied ones once; the tensors themselves, which a step changes in place."""
        return {name: parameter.detach() for name, parameter in self._model.named_parameters()}

    def roofline(self) -> Roofline:
        """What the device reaches in the type that products are computed in; measured now, or before."""
        return measured(str(self._device), "bfloat16" if self.autocast else "float32")

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take these weights, by the names of `parameters`, and forget the optimizer's moments: they are of others."""
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                parameter.copy_(tensors[name])
        self.optimizer.state.clear()

    def train(self, groups: Sequence[Group], step: int) -> StepResult:
        """One optimizer step; `step` counts from 0 and sets the warm-up. The batch must hold a loss token.

        A step whose loss or gradient is not finite changes nothing, and says so in `skipped`.
        """
        self._lane.bind()
        with self._lane.during("batch_assembly"):
            samples = [self._samples(group) for group in groups]
            everything = [sample for group in samples for sample in group]
            trained = [[sample for sample in group if sample.advantage != 0.0] for group in samples]
            rows = pack(trained, self._config.token_budget)
        denominators = Denominators(
            rollouts=sum(bool(sample.trajectory.loss_mask_T.any()) for sample in everything),
            tokens=sum(int(sample.trajectory.loss_mask_T.sum()) for sample in everything),
            max_tokens=self._max_tokens,
        )
        total, grad_norm, skipped = 0.0, 0.0, "no rollout has an advantage"
        diagnostics = [0.0, 0.0]
        with self._lane.during("forward_backward"):
            for row in rows:
                value, mismatch, clipped = self._accumulate(row, denominators)
                total += value
                diagnostics[0] += mismatch
                diagnostics[1] += clipped
        if rows:
            with self._lane.during("optimizer"):
                grad_norm, skipped = self._move(total, step)
            self._lane.did("optimizer", self._shape.adam_flop(), self._shape.adam_bytes())
        trained_tokens = max(1, sum(row.targets_N.size for row in rows))
        rewards = [sample.trajectory.reward for sample in everything]
        said = [sample.trajectory.correct for sample in everything if sample.trajectory.correct is not None]
        return StepResult(
            loss=total,
            grad_norm=grad_norm,
            reward=float(np.mean(rewards)),
            accuracy=float(np.mean(said)) if said else None,
            rollouts=len(everything),
            without_advantage=len(everything) - sum(len(group) for group in trained),
            tokens=sum(sample.trajectory.token_ids_T.size for sample in everything),
            packed_tokens=sum(row.token_ids_T.size for row in rows),
            loss_tokens=denominators.tokens,
            mismatch=diagnostics[0] / trained_tokens,
            clipped=diagnostics[1] / trained_tokens,
            skipped=skipped,
        )

    def _samples(self, group: Group) -> list[Sample]:
        rewards_G = np.array([trajectory.reward for trajectory in group.trajectories], dtype=np.float64)
        advantages_G = self._advantage(rewards_G)
        return [
            Sample(trajectory, float(value)) for trajectory, value in zip(group.trajectories, advantages_G, strict=True)
        ]

    def _accumulate(self, row: Row, denominators: Denominators) -> tuple[float, float, float]:
        """Forward and backward of one microbatch: its loss, and sums of mismatch and clipped tokens."""
        device = self._device
        with torch.autocast(device.type, torch.bfloat16, enabled=self.autocast):
            logprobs_N = packed_logprobs(
                self._model,
                torch.from_numpy(row.token_ids_T).to(device),
                torch.from_numpy(row.positions_T).to(device),
                row.blocks,
                torch.from_numpy(row.sources_N).to(device),
                torch.from_numpy(row.targets_N).to(device),
                self._temperature,
            )
        tokens = LossTokens(
            logprobs_N=logprobs_N,
            behaviour_N=torch.from_numpy(row.behaviour_N).to(device),
            advantages_N=torch.from_numpy(row.advantages_N).to(device),
            lengths_N=torch.from_numpy(row.lengths_N).to(device),
        )
        value = self._loss(tokens, denominators, self._settings)
        value.backward()  # type: ignore[no-untyped-call]
        contexts = sum(block_contexts(block.prefix, block.suffixes) for block in row.blocks)
        flop = self._shape.train_flop(row.token_ids_T.size, contexts, row.targets_N.size)
        self._lane.did("forward_backward", flop, self._shape.train_bytes(2 if self.autocast else 4))
        difference_N = logprobs_N.detach() - tokens.behaviour_N
        ratio_N = difference_N.exp()
        clipped = (ratio_N < 1 - self._settings.clip_low) | (ratio_N > 1 + self._settings.clip_high)
        return float(value.detach()), float(difference_N.abs().sum()), float(clipped.sum())

    def _move(self, total: float, step: int) -> tuple[float, str]:
        """Clip and step, unless something is not finite; (gradient norm, why it was skipped)."""
        norm = float(torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._config.clip_norm))
        skipped = ""
        if not math.isfinite(total):
            skipped = "the loss is not finite"
        elif not math.isfinite(norm):
            skipped = "the gradient is not finite"
        else:
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate(self._config, step)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm, skipped


def learning_rate(config: TrainerConfig, step: int) -> float:
    """Linear warm-up over `warmup_steps`, then constant."""
    return config.learning_rate * min(1.0, (step + 1) / max(1, config.warmup_steps))


def autocast(config: TrainerConfig, model: Any, device: str) -> bool:
    """Whether matrix products run in bfloat16: as configured, or where a short measurement says that it pays."""
    if config.autocast != "auto":
        return config.autocast == "bfloat16"
    hidden = int(model.config.hidden_size)
    intermediate = int(getattr(model.config, "intermediate_size", None) or 4 * hidden)
    return compute_dtype("auto", device, hidden, intermediate, min(config.token_budget, PROBE_ROWS)) == "bfloat16"
