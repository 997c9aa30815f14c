"""Drift: how far the trained tokens of a step are from the policies that sampled them, measured beside training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from consumers.losses.objective import reference_kl
from consumers.losses.ratios import rollout_ratio, token_ratio
from consumers.losses.tokens import LossSettings, LossTokens

PERCENTILES = (1, 50, 99)


@dataclass(frozen=True, slots=True)
class Drift:
    """Of the trained tokens of one step; None where nothing was to be measured.

    r is the ratio of the policy, as it was when the token was trained on, to the one that sampled it.
    """

    mismatch: float = 0.0
    """Mean of |log r|, nats."""
    clipped: float = 0.0
    """Share of tokens whose ratio, as the loss takes it, is outside the clip range."""
    masked: float = 0.0
    """Share of tokens that the off-policy correction left out."""
    ratios: tuple[float, ...] | None = None
    """The percentiles PERCENTILES of r."""
    largest: float | None = None
    """The greatest r."""
    effective: float | None = None
    """Effective sample size under weights r, (Σ r)² / Σ r², by the number of tokens: 1 on the policy."""
    engine_kl: float | None = None
    """KL from engine to trainer, nats per token, over tokens that the trained version itself sampled: an estimate, 0
    when both compute the same. None where there is no such token."""
    engine_tokens: int = 0
    """How many tokens these were."""
    reference_kl: float | None = None
    """KL from the policy to the reference model, nats per token."""
    entropy: float | None = None
    """Of the distributions that the tokens were drawn from, nats per token."""

    def measured(self) -> list[tuple[str, float]]:
        """What there is of it, by name."""
        ratios = zip((f"ratio_p{p}" for p in PERCENTILES), self.ratios or (), strict=self.ratios is not None)
        figures = [
            ("mismatch", self.mismatch),
            ("clipped", self.clipped),
            ("masked", self.masked),
            *ratios,
            ("ratio_max", self.largest),
            ("effective", self.effective),
            ("engine_kl", self.engine_kl),
            ("engine_tokens", float(self.engine_tokens)),
            ("reference_kl", self.reference_kl),
            ("entropy", self.entropy),
        ]
        return [(name, value) for name, value in figures if value is not None]

    def figures(self) -> dict[str, Any]:
        """The same for a step's line, where an `engine_kl` that nobody can tell is null."""
        rounded = {name: round(value, 6) for name, value in self.measured()}
        return {"engine_kl": None, **rounded, "engine_tokens": self.engine_tokens}


class Measuring:
    """Collects what `Drift` is made of, microbatch by microbatch: a few numbers per token."""

    def __init__(self, settings: LossSettings, *, by_rollout: bool) -> None:
        """`by_rollout`: the loss's ratio is that of the rollout."""
        self._settings = settings
        self._ratio = rollout_ratio if by_rollout else token_ratio
        self._log_ratios: list[npt.NDArray[np.float32]] = []
        self._engine: list[npt.NDArray[np.float32]] = []
        self._sums = {"clipped": 0.0, "masked": 0.0, "reference_kl": 0.0, "entropy": 0.0}

    @torch.no_grad()
    def add(self, tokens: LossTokens, current_N: npt.NDArray[np.bool_], start_N: torch.Tensor | None) -> None:
        """`current_N`: sampled by the version that is trained; `start_N`: log-probs under that, None where unknown."""
        low, high = 1.0 - self._settings.clip_low, 1.0 + self._settings.clip_high
        ratio_N = self._ratio(tokens)
        self._sums["clipped"] += float(((ratio_N < low) | (ratio_N > high)).sum())
        self._sums["masked"] += float((tokens.weights_N == 0).sum())
        self._log_ratios.append((tokens.logprobs_N - tokens.behaviour_N).cpu().numpy())
        if start_N is not None and current_N.any():
            self._engine.append((start_N - tokens.behaviour_N).cpu().numpy()[current_N])
        if tokens.reference_N is not None:
            self._sums["reference_kl"] += float(reference_kl(tokens.logprobs_N, tokens.reference_N).sum())
        if tokens.entropy_N is not None:
            self._sums["entropy"] += float(tokens.entropy_N.sum())

    def drift(self) -> Drift:
        if not self._log_ratios:
            return Drift()
        log_ratios_N = np.concatenate(self._log_ratios).astype(np.float64)
        count = log_ratios_N.size
        mean = {name: total / count for name, total in self._sums.items()}
        low, *_ = quantiles_N = np.percentile(log_ratios_N, PERCENTILES)
        scaled_N = np.exp(log_ratios_N - log_ratios_N.max())
        engine_kl, engine_tokens = self._engine_kl()
        return Drift(
            mismatch=float(np.abs(log_ratios_N).mean()),
            clipped=mean["clipped"],
            masked=mean["masked"],
            ratios=tuple(float(value) for value in np.exp(quantiles_N)) if np.isfinite(low) else None,
            largest=float(np.exp(log_ratios_N.max())),
            effective=float(scaled_N.sum() ** 2 / (scaled_N**2).sum() / count),
            engine_kl=engine_kl,
            engine_tokens=engine_tokens,
            reference_kl=mean["reference_kl"] if self._settings.kl_coefficient else None,
            entropy=mean["entropy"] if self._settings.entropy_coefficient else None,
        )

    def _engine_kl(self) -> tuple[float | None, int]:
        """Mean of r - log r - 1 over what the engine sampled, which estimates KL(engine, trainer)."""
        if not self._engine:
            return None, 0
        log_ratios_N = np.concatenate(self._engine).astype(np.float64)
        return float((np.exp(log_ratios_N) - log_ratios_N - 1.0).mean()), log_ratios_N.size
