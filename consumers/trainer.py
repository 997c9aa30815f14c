"""The trainer: float32 master weights, and what one step does with a batch. Synchronous; one thread calls it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from broker.messages import Group
from consumers.advantages import advantage
from consumers.advantages.rewards import overlong
from consumers.checkpoint import WEIGHTS, digest_synced, optimizer_tensors
from consumers.drift import Drift, Measured, Measuring
from consumers.forward import Forward, autocast
from consumers.losses import method
from consumers.losses.correction import correction
from consumers.losses.tokens import Denominators, LossTokens
from consumers.packing import Row, Sample, pack_shares
from consumers.ranks.group import Ranks
from consumers.ranks.orders import Gather, Order, Restore, Save, Train, Update, rows_in, update_of
from consumers.ranks.sharding import placed, rows_of, shard, whole
from consumers.schedule import learning_rate
from consumers.sharded import Writing
from headrace.config import Config
from headrace.config_trainer import TrainerConfig
from headrace.policy.activations import recompute_activations
from headrace.policy.intensity import measured, observe
from headrace.telemetry.arithmetic import Roofline
from headrace.telemetry.phases import Lane
from headrace.version import PolicyVersion


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step did."""

    loss: float
    """Mean over its updates."""
    grad_norm: float
    """Before clipping, the largest of its updates; 0 when there was no backward pass."""
    learning_rate: float
    reward: float
    """Mean over rollouts, as the environment gave it."""
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
    drift: Drift
    """How far the trained tokens are from their samplers."""
    skipped: str
    """Why the optimizer did not move, or not at each update; empty when it did."""


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """What one rank computes of one optimizer update."""

    rows: list[Row]
    denominators: Denominators
    """Of all ranks."""


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """Log-probs of a row's targets under policies that do not change in a step, where they were asked for."""

    reference_N: torch.Tensor | None
    start_N: torch.Tensor | None
    """Under the policy that begins the step."""


class Trainer:
    """Model, optimizer, and what a step does with a batch of groups."""

    def __init__(
        self,
        model: Any,
        config: Config,
        lane: Lane,
        reference: Any = None,
        ranks: Ranks | None = None,
        device: str = "",
    ) -> None:
        """`model` is a transformers causal LM with float32 parameters, `reference` the frozen one of the KL penalty.

        All `ranks` make theirs at once; where each gets a part of the model, it comes onto `device` here. Raises
        ConfigError for an unknown advantage or loss, ModelError when a model cannot share prompts.
        """
        self._config: TrainerConfig = config.trainer
        self._steps = config.run.steps
        self._max_tokens = config.sampling.max_new_tokens
        self._advantage = advantage(config.trainer.advantage)
        self._method = method(config.trainer.loss)
        self._settings = self._method.settings(config.trainer)
        if self._settings.kl_coefficient and reference is None:
            raise ValueError("a KL penalty needs a reference model")
        self._lane = lane
        self._model = model
        self._device = torch.device(device) if device else next(model.parameters()).device
        lane.place.device = str(self._device)
        observe(lane, str(self._device))
        self._ranks = ranks = ranks or Ranks()
        # Measured, where it is: the ranks compute alike.
        first = ranks.rank == 0 and autocast(config.trainer, model, str(self._device))
        self.autocast = bool(ranks.sum(float(first)))
        if config.trainer.activation_checkpointing:
            recompute_activations(model)
        temperature = config.sampling.temperature
        self._policy = Forward(model, lane, temperature, autocast=self.autocast)
        self._reference = None
        if reference is not None:
            self._reference = Forward(reference, lane, temperature, autocast=self.autocast)
        if ranks.sharded:
            for sharded in (model, reference) if reference is not None else (model,):
                shard(sharded, ranks.size, self._device.type)
        self._writing = Writing(ranks.saving, ranks.rank, ranks.explaining) if ranks.sharded and ranks.saving else None
        # Where a distribution was cut, log-probs differ by right.
        self._comparable = config.sampling.top_p == 1.0 and not config.sampling.top_k
        self.optimizer = _adamw(model, config.trainer)

    def parameters(self) -> dict[str, torch.Tensor]:
        """Name to float32 master weight, tied ones once; the tensors themselves, which a step changes in place.

        Where ranks have parts of the model, each is a DTensor.
        """
        return {name: parameter.detach() for name, parameter in self._model.named_parameters()}

    def roofline(self) -> Roofline:
        """What the device reaches in the type that products are computed in; measured now, or before."""
        return measured(str(self._device), "bfloat16" if self.autocast else "float32")

    def free(self) -> None:
        """Give back what the allocator of a GPU keeps between two steps."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def rows(self) -> dict[str, torch.Tensor]:
        """The same, of each its rows that this rank publishes: those of `torch.chunk`. Scalars are every rank's."""
        rank, size = self._ranks.rank, self._ranks.size
        return {name: rows_of(tensor, rank, size) for name, tensor in self.parameters().items()}

    def weights(self) -> dict[str, torch.Tensor]:
        """Name to whole float32 master weight; those of ranks that have parts of them are gathered on the CPU."""
        if not self._ranks.sharded:
            return self.parameters()
        self._ranks.tell(Gather())
        return self._gathered()

    def save(self, folder: Path) -> Future[dict[str, str]]:
        """Of ranks that have parts of the model: copy weights and the optimizer's state, and begin to write them.

        The future is of name and digest of each rank's file; it raises CheckpointError.
        """
        self._ranks.tell(Save(str(folder)))
        return self._save(folder)

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take these weights, by the names of `parameters`, and forget the optimizer's moments: they are of others.

        Rank 0 has them.
        """
        self._ranks.tell(Restore())
        self._take(tensors)

    def follow(self, order: Order) -> None:
        """What rank 0 does, on another rank."""
        self._lane.bind()
        if isinstance(order, Train):
            self._make([_part(update) for update in order.updates], order.step)
        elif isinstance(order, Restore):
            with self._lane.during("restore"):
                self._take({})
        elif isinstance(order, Gather):
            with self._lane.during("export"):
                self._gathered()
        elif isinstance(order, Save):
            with self._lane.during("checkpoint"):
                # What becomes of it, rank 0 is told.
                self._save(Path(order.folder))
        else:
            raise TypeError(f"{type(order).__name__} is nothing that a trainer does")

    def train(self, groups: Sequence[Group], step: int, incarnation: int) -> StepResult:
        """One step of an incarnation; `step` counts from 0, and is that of the version that is trained.

        The batch must hold a loss token. An update whose loss or gradient is not finite changes nothing, and `skipped`
        says so.
        """
        self._lane.bind()
        with self._lane.during("batch_assembly"):
            samples = self._samples(groups)
            trained = [
                [one for one in group if self._settings.regularised or one.advantage != 0.0] for group in samples
            ]
            version = PolicyVersion(incarnation, step) if self._comparable else None
            shares = equal_shares(len(samples), self._config.minibatches)
            parts = [self._parts(samples[share], trained[share], version) for share in shares]
            used = [of_all for of_all in parts if of_all[0].rows]
            others = range(1, self._ranks.size)
            self._ranks.deal([Train(step, [_dealt(of_all[rank]) for of_all in used]) for rank in others])
        updates, drift = self._make([of_all[0] for of_all in used], step)
        everything = [sample for group in samples for sample in group]
        said = [sample.trajectory.correct for sample in everything if sample.trajectory.correct is not None]
        return StepResult(
            loss=sum(value for value, _, _ in updates) / max(1, len(updates)),
            grad_norm=max((norm for _, norm, _ in updates), default=0.0),
            learning_rate=learning_rate(self._config, step, self._steps),
            reward=float(np.mean([sample.trajectory.reward for sample in everything])),
            accuracy=float(np.mean(said)) if said else None,
            rollouts=len(everything),
            without_advantage=sum(sample.advantage == 0.0 for sample in everything),
            tokens=sum(sample.trajectory.token_ids_T.size for sample in everything),
            packed_tokens=sum(row.token_ids_T.size for of_all in used for part in of_all for row in part.rows),
            loss_tokens=sum(of_all[0].denominators.tokens for of_all in parts),
            drift=drift,
            skipped=next((why for _, _, why in updates if why), "") if updates else "no rollout has an advantage",
        )

    def _make(self, parts: Sequence[Part], step: int) -> tuple[list[tuple[float, float, str]], Drift]:
        """This rank's parts of the updates of a step. Returns what `_update` does, the same on every rank, and the
        drift over all of them."""
        known = [self._known(part.rows) for part in parts]
        measuring = Measuring(self._settings, by_rollout=self._method.by_rollout)
        updates: list[tuple[float, float, str]] = []
        for part, of_part in zip(parts, known, strict=True):
            updates.append(self._update(part, of_part, measuring, step, first=not updates))
        measured = self._ranks.gather(measuring.measured().encode())
        return updates, measuring.drift([Measured.decode(one) for one in measured])

    def _take(self, tensors: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                given = tensors.get(name, torch.empty(0))
                mine = torch.empty(parameter.shape) if self._ranks.rank else given.to("cpu", torch.float32).contiguous()
                parameter.copy_(placed(self._ranks.spread(mine), parameter))
        self.optimizer.state.clear()

    def _save(self, folder: Path) -> Future[dict[str, str]]:
        assert self._writing is not None
        weights = {f"{WEIGHTS}{name}": tensor for name, tensor in self.parameters().items()}
        optimizer = optimizer_tensors(self._model, self.optimizer)
        return self._writing.begin({**weights, **optimizer}, folder, digest_synced)

    def _gathered(self) -> dict[str, torch.Tensor]:
        """All weights whole, on the CPU of rank 0; the others only give."""
        found = {}
        for name, tensor in self.parameters().items():
            full = whole(tensor)
            if self._ranks.rank == 0:
                found[name] = full.cpu()
        return found

    def _samples(self, groups: Sequence[Group]) -> list[list[Sample]]:
        """The rollouts of each group with their advantages."""
        rewards = [self._rewards(group) for group in groups]
        return [
            [Sample(trajectory, float(value)) for trajectory, value in zip(group.trajectories, values_G, strict=True)]
            for group, values_G in zip(groups, self._advantage(rewards), strict=True)
        ]

    def _rewards(self, group: Group) -> npt.NDArray[np.float64]:
        """[G]: as given, less what a rollout loses that is nearly too long."""
        rewards_G = np.array([one.reward for one in group.trajectories], np.float64)
        lengths_G = np.array(
            [sum(span.end - span.start for span in one.spans) for one in group.trajectories], np.float64
        )
        buffer, penalty = self._config.overlong_buffer, self._config.overlong_penalty
        return rewards_G + overlong(lengths_G, self._max_tokens, buffer, penalty)

    def _parts(
        self, samples: list[list[Sample]], trained: list[list[Sample]], version: PolicyVersion | None
    ) -> list[Part]:
        """One per rank."""
        everything = [sample.trajectory for group in samples for sample in group]
        denominators = Denominators(
            rollouts=sum(bool(trajectory.loss_mask_T.any()) for trajectory in everything),
            tokens=sum(int(trajectory.loss_mask_T.sum()) for trajectory in everything),
            max_tokens=self._max_tokens,
        )
        shares = pack_shares(trained, self._config.token_budget, self._ranks.size, version)
        return [Part(rows, denominators) for rows in shares]

    def _known(self, rows: Sequence[Row]) -> list[Known]:
        """Before the first update, so that the policy is the one that begins the step."""
        nothing: list[torch.Tensor | None] = [None] * len(rows)
        reference = self._reference.frozen(rows, "reference_logprobs") if self._reference else nothing
        asked = self._settings.needs_start and self._config.minibatches > 1
        start = self._policy.frozen(rows, "proximal_logprobs") if asked else nothing
        return [Known(*columns) for columns in zip(reference, start, strict=True)]

    def _update(
        self, part: Part, known: Sequence[Known], measuring: Measuring, step: int, *, first: bool
    ) -> tuple[float, float, str]:
        """Loss, gradient norm, and why the optimizer did not move. `first`: it has not moved in this step."""
        total = 0.0
        with self._lane.during("forward_backward"):
            for row, of_row in zip(part.rows, known, strict=True):
                total += self._accumulate(row, of_row, part.denominators, measuring, first=first)
        if self._ranks.size > 1:
            with self._lane.during("gradient_sync"):
                self._ranks.reduce_gradients(self._model)
                total = self._ranks.sum(total)
        with self._lane.during("optimizer"):
            norm, skipped = self._move(total, step)
        shape = self._policy.shape
        self._lane.did("optimizer", shape.adam_flop(), shape.adam_bytes())
        return total, norm, skipped

    def _accumulate(
        self, row: Row, known: Known, denominators: Denominators, measuring: Measuring, *, first: bool
    ) -> float:
        """Forward and backward of one microbatch; returns its part of the loss."""
        policy, settings = self._policy, self._settings
        if row.is_filling:
            (0.0 * policy.logprobs(row).sum()).backward()  # type: ignore[no-untyped-call]
            return 0.0
        if settings.entropy_coefficient:
            logprobs_N, entropy_N = policy.logprobs_and_entropy(row)
        else:
            logprobs_N, entropy_N = policy.logprobs(row), None
        start_N = logprobs_N.detach() if first and known.start_N is None else known.start_N
        behaviour_N, lengths_N = policy.tensor(row.behaviour_N), policy.tensor(row.lengths_N)
        rollouts_N = policy.tensor(row.rollouts_N)
        weights_N = torch.ones_like(behaviour_N)
        if settings.needs_start and start_N is not None:
            weights_N = correction(start_N, behaviour_N, rollouts_N, lengths_N, settings)
        tokens = LossTokens(
            logprobs_N=logprobs_N,
            behaviour_N=behaviour_N,
            advantages_N=policy.tensor(row.advantages_N),
            lengths_N=lengths_N,
            rollouts_N=rollouts_N,
            old_N=behaviour_N if settings.correction == "ratio" or start_N is None else start_N,
            weights_N=weights_N,
            reference_N=known.reference_N,
            entropy_N=entropy_N,
        )
        value = self._method.loss(tokens, denominators, settings)
        value.backward()  # type: ignore[no-untyped-call]
        policy.trained(row)
        measuring.add(tokens, row.current_N, start_N)
        return float(value.detach())

    def _move(self, total: float, step: int) -> tuple[float, str]:
        """Clip and step, unless something is not finite; (gradient norm, why it was skipped)."""
        norm = float(whole(torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._config.clip_norm)))
        skipped = ""
        if not math.isfinite(total):
            skipped = "the loss is not finite"
        elif not math.isfinite(norm):
            skipped = "the gradient is not finite"
        else:
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate(self._config, step, self._steps)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm, skipped


def _adamw(model: Any, config: TrainerConfig) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        model.parameters(),
        lr=config.learning_rate,
        betas=config.adam_betas,
        weight_decay=config.weight_decay,
        fused=True,
    )


def _dealt(part: Part) -> Update:
    return update_of(part.rows, part.denominators)


def _part(update: Update) -> Part:
    return Part(rows_in(update), Denominators(update.rollouts, update.tokens, update.max_tokens))


def equal_shares(count: int, shares: int) -> list[slice]:
    """`count` things in order as so many parts of nearly equal size, empty ones left out."""
    edges = [count * share // shares for share in range(shares + 1)]
    return [slice(low, high) for low, high in pairwise(edges) if low < high]
