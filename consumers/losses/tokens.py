"""What a loss is computed from: named tensors of one microbatch, numbers of the whole batch, and settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from headrace.config_trainer import TrainerConfig

Correction = Literal["ratio", "token", "sequence"]


@dataclass(frozen=True, slots=True, eq=False)
class LossTokens:
    """N sampled tokens of one microbatch. Of a rollout all tokens are here that enter the loss, or none."""

    logprobs_N: torch.Tensor
    """float32, under the policy that is trained; carries the gradient."""
    behaviour_N: torch.Tensor
    """float32, under the policy that sampled."""
    advantages_N: torch.Tensor
    """float32, that of the token's rollout."""
    lengths_N: torch.Tensor
    """float32, number of loss tokens of the token's rollout."""
    rollouts_N: torch.Tensor
    """int64, which rollout of the microbatch the token is of, from 0."""
    old_N: torch.Tensor
    """float32, under the policy that the importance ratio compares with (`trainer.correction`)."""
    weights_N: torch.Tensor
    """float32, off-policy correction of `consumers/losses/correction.py`; 1 where nothing is corrected."""
    reference_N: torch.Tensor | None = None
    """float32, under the reference model; None where there is no KL penalty."""
    entropy_N: torch.Tensor | None = None
    """float32, of the distribution that the token is drawn from (nats), with gradient; None without a bonus."""


@dataclass(frozen=True, slots=True)
class Denominators:
    """Numbers of all that one optimizer update uses, however it is split."""

    rollouts: int
    """Those with a token in the loss."""
    tokens: int
    """Loss tokens of all rollouts."""
    max_tokens: int
    """Most tokens that a rollout may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """The configuration's, with "auto" resolved."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 3.0
    importance_cap: float = 2.0
    correction: Correction = "ratio"
    mask: Literal["off", "token", "sequence"] = "off"
    mask_low: float = 0.5
    mask_high: float = 2.0
    kl_coefficient: float = 0.0
    entropy_coefficient: float = 0.0

    @property
    def regularised(self) -> bool:
        """Whether rollouts without advantage have a gradient, too."""
        return self.kl_coefficient > 0 or self.entropy_coefficient > 0

    @property
    def needs_start(self) -> bool:
        """Whether log-probs under the policy that begins the step are asked for."""
        return self.correction != "ratio" or self.mask != "off"


Loss = Callable[[LossTokens, Denominators, LossSettings], torch.Tensor]
"""A scalar to be minimised."""


@dataclass(frozen=True, slots=True)
class Method:
    """A loss, with what it is published with where the configuration says "auto"."""

    loss: Loss
    clip_low: float = 0.2
    clip_high: float = 0.2
    correction: Correction = "ratio"
    by_rollout: bool = False
    """Its ratio is one of the whole rollout."""

    def settings(self, config: TrainerConfig) -> LossSettings:
        return LossSettings(
            clip_low=self.clip_low if config.clip_low == "auto" else config.clip_low,
            clip_high=self.clip_high if config.clip_high == "auto" else config.clip_high,
            dual_clip=config.dual_clip,
            importance_cap=config.importance_cap,
            correction=self.correction if config.correction == "auto" else config.correction,
            mask=config.mask,
            mask_low=config.mask_low,
            mask_high=config.mask_high,
            kl_coefficient=config.kl_coefficient,
            entropy_coefficient=config.entropy_coefficient,
        )
