"""The trainer's section of the configuration tree: batches, advantages, losses and the optimizer (docs/losses.md)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator

from headrace.config_base import LARGEST_COUNT, LARGEST_FACTOR, WEEK_S, PathText, Section, Threads
from headrace.objects import near

Beta = Annotated[float, Field(ge=0, lt=1)]
INITIAL = "initial"
"""The reference model that the run begins with."""
ADVANTAGES = ("grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline")
LOSSES = ("grpo", "dr_grpo", "dapo", "ppo", "dual_clip", "decoupled_ppo", "gspo", "cispo", "reinforce")
GLOBAL_ADVANTAGES = ("reinforce_pp",)
"""Advantages that compare with the whole batch: under these a group of equal rewards has a signal, too."""


def _auto_or(most: float) -> Callable[[Any], float | str]:
    """ "auto", or a number from 0 to `most`. As one rule, so that a wrong value is one sentence."""

    def check(given: Any) -> float | str:
        number = isinstance(given, int | float) and not isinstance(given, bool)
        if given != "auto" and not (number and 0 <= given <= most):
            raise ValueError(f'must be "auto" or a number from 0 to {most:g}')
        return given if given == "auto" else float(given)

    return check


class TrainerConfig(Section):
    groups_per_step: int = Field(8, ge=1, le=4096)
    group_size: int = Field(8, ge=1, le=4096)
    advantage: str = "grpo"
    """One of ADVANTAGES, or your own as `package.module:object`."""
    loss: str = "grpo"
    """One of LOSSES, or your own as `package.module:object`."""
    minibatches: int = Field(1, ge=1, le=4096)
    """Optimizer updates that a step makes, each from an equal part of its groups."""
    learning_rate: float = Field(1e-5, gt=0, lt=1)
    warmup_steps: int = Field(0, ge=0, le=LARGEST_COUNT)
    """Steps in which the learning rate grows linearly to its full value."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """The learning rate after the warm-up; "linear" and "cosine" fall until the last of `run.steps`."""
    final_learning_rate: float = Field(0.0, ge=0, lt=1)
    """What a schedule that falls ends at."""
    weight_decay: float = Field(0.0, ge=0, le=LARGEST_FACTOR)
    adam_betas: tuple[Beta, Beta] = (0.9, 0.95)
    clip_norm: float = Field(1.0, gt=0, le=LARGEST_FACTOR)
    clip_low: Annotated[float | Literal["auto"], PlainValidator(_auto_or(1.0))] = "auto"
    """How far below 1 the importance ratio counts; "auto" is what the loss is published with."""
    clip_high: Annotated[float | Literal["auto"], PlainValidator(_auto_or(LARGEST_FACTOR))] = "auto"
    """How far above 1."""
    dual_clip: float = Field(3.0, gt=1, le=LARGEST_FACTOR)
    """Loss "dual_clip": how many times its advantage a bad token counts at most."""
    importance_cap: float = Field(2.0, gt=0, le=LARGEST_FACTOR)
    """Truncation of the importance ratio between trainer and behaviour policy."""
    correction: Literal["auto", "ratio", "token", "sequence"] = "auto"
    """What accounts for tokens that another policy sampled. "ratio": the loss's own ratio, taken to that policy;
    "token", "sequence": the loss's ratio is taken to the policy that begins the step, and each token, or rollout, is
    weighted by its ratio from there to the policy that sampled, up to `importance_cap`; "auto" is the loss's own."""
    mask: Literal["off", "token", "sequence"] = "off"
    """Leave out tokens whose ratio between the step's first and the sampling policy is outside `mask_low` to
    `mask_high`, or whole rollouts, by the geometric mean over their tokens."""
    mask_low: float = Field(0.5, ge=0, le=1)
    mask_high: float = Field(2.0, ge=1, le=LARGEST_FACTOR)
    kl_coefficient: float = Field(0.0, ge=0, le=LARGEST_FACTOR)
    """Weight of the KL penalty against the reference model; 0 loads none."""
    reference: PathText = INITIAL
    """The reference model, a folder or hub id; "initial" is the model that the run begins with."""
    entropy_coefficient: float = Field(0.0, ge=0, le=LARGEST_FACTOR)
    """Weight of the entropy bonus."""
    overlong_buffer: int = Field(0, ge=0, le=LARGEST_COUNT)
    """The last so many of `sampling.max_new_tokens` are punished, more with each token; 0 punishes no length."""
    overlong_penalty: float = Field(1.0, ge=0, le=LARGEST_FACTOR)
    """What is taken from the reward of a rollout of full length."""
    dynamic_sampling: int = Field(0, ge=0, le=64)
    """Groups of equal rewards are replaced by new prompts, in one step at most so many times `groups_per_step`; what
    comes after them, and with 0 every one, is taken as it is."""
    engine_kl_bound: float = Field(0.02, gt=0, le=LARGEST_FACTOR)
    """KL from engine to trainer, in nats per token of the version that is trained, above which both disagree."""
    token_budget: int = Field(2048, ge=16, le=LARGEST_COUNT)
    """Tokens of one microbatch, shared prompts counted once."""
    activation_checkpointing: bool = False
    """Compute each layer once more in the backward pass, and keep only its input: less memory, a third more work."""
    autocast: Literal["auto", "bfloat16", "off"] = "auto"
    threads: Threads = 1
    """Of each rank."""
    ranks: int = Field(1, ge=1, le=4096)
    """Processes that make each step together, all on this host; `torchrun` decides it for those that it starts."""
    parallel: Literal["data", "fsdp"] = "data"
    """Of several ranks: each has the whole model, or FSDP2 spreads it with its gradients and moments over all."""
    backend: Literal["auto", "nccl", "ucc", "gloo"] = "auto"
    """How ranks exchange gradients and weights; "auto" is nccl on GPUs and gloo on CPUs."""
    ranks_silent_s: float = Field(120.0, gt=0, le=WEEK_S)
    """A rank that answers the others not even that it lives for so long is taken for dead."""
    without_producers: Literal["wait", "end"] = "wait"
    """Whether a run that no producer plays for waits for one, or ends as failed."""
    without_producers_s: float = Field(600.0, gt=0, le=WEEK_S)
    """Until it ends, the time in which producers load included; a run that waits says so all the time."""


def check_ranks(trainer: TrainerConfig, ranks: int, placement: str) -> None:
    """Raises ValueError for more ranks than an optimizer update has groups, or on a device that engines use."""
    if ranks > 1 and placement != "disaggregated":
        raise ValueError(
            f"trainer.ranks: {ranks} ranks need a device each, and run.placement = {placement!r} has one for all; take "
            'one rank, or placement "disaggregated"'
        )
    groups = trainer.groups_per_step // trainer.minibatches
    if ranks > groups:
        raise ValueError(
            f"trainer.ranks: {ranks} is more than the {groups} groups of an optimizer update (trainer.groups_per_step "
            f"= {trainer.groups_per_step}, trainer.minibatches = {trainer.minibatches}); start fewer, or raise "
            "groups_per_step"
        )


def check_trainer(trainer: TrainerConfig, max_new_tokens: int) -> None:
    """Raises ValueError for values that do not fit together, with the way out."""
    for key, name, known in (("advantage", trainer.advantage, ADVANTAGES), ("loss", trainer.loss, LOSSES)):
        if ":" not in name and name not in known:
            raise ValueError(
                f"trainer.{key}: {name!r} is not known{near(name, known)}; use one of {', '.join(known)}, or your own "
                "as package.module:object"
            )
    if trainer.minibatches > trainer.groups_per_step:
        raise ValueError(
            f"trainer.minibatches: {trainer.minibatches} is more than trainer.groups_per_step = "
            f"{trainer.groups_per_step}; lower it, or raise the groups"
        )
    if trainer.schedule != "constant" and trainer.final_learning_rate > trainer.learning_rate:
        raise ValueError(
            f"trainer.final_learning_rate: {trainer.final_learning_rate:g} is above trainer.learning_rate = "
            f"{trainer.learning_rate:g}, from which schedule = {trainer.schedule!r} falls to it; lower it"
        )
    if trainer.overlong_buffer > max_new_tokens:
        raise ValueError(
            f"trainer.overlong_buffer: {trainer.overlong_buffer} is more than sampling.max_new_tokens = "
            f"{max_new_tokens}, of which it is the last part; lower it"
        )
    if trainer.dynamic_sampling and trainer.advantage in GLOBAL_ADVANTAGES:
        raise ValueError(
            f"trainer.dynamic_sampling: {trainer.dynamic_sampling} replaces groups of equal rewards, which have a "
            f"signal under trainer.advantage = {trainer.advantage!r}; set it to 0, or take another advantage"
        )
