"""Drift: how far the trained tokens of a step are from the policies that sampled them, measured beside training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
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


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """What one rank has of it."""

    log_ratios_N: npt.NDArray[np.float32]
    engine_N: npt.NDArray[np.float32]
    """Of the tokens that the trained version sampled, from the policy that begins the step."""
    sums: dict[str, float]

    def encode(self) -> bytes:
        return msgspec.msgpack.encode((self.log_ratios_N.tobytes(), self.engine_N.tobytes(), self.sums))

    @classmethod
    def decode(cls, data: bytes) -> Measured:
        log_ratios, engine, sums = msgspec.msgpack.decode(data, type=tuple[bytes, bytes, dict[str, float]])
        return cls(np.frombuffer(log_ratios, np.float32), np.frombuffer(engine, np.float32), sums)


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

    def measured(self) -> Measured:
        return Measured(_joined(self._log_ratios), _joined(self._engine), self._sums)

    def drift(self, measured: Sequence[Measured]) -> Drift:
        """Of all ranks."""
        log_ratios_N = _joined([one.log_ratios_N for one in measured]).astype(np.float64)
        if not log_ratios_N.size:
            return Drift()
        count = log_ratios_N.size
        mean = {name: sum(one.sums[name] for one in measured) / count for name in self._sums}
        low, *_ = quantiles_N = np.percentile(log_ratios_N, PERCENTILES)
        scaled_N = np.exp(log_ratios_N - log_ratios_N.max())
        engine_kl, engine_tokens = _engine_kl(_joined([one.engine_N for one in measured]))
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


def _joined(parts: Sequence[npt.NDArray[np.float32]]) -> npt.NDArray[np.float32]:
    return np.concatenate(parts) if parts else np.zeros(0, np.float32)


def _engine_kl(engine_N: npt.NDArray[np.float32]) -> tuple[float | None, int]:
    """Mean of r - log r - 1 over what the engine sampled, which estimates KL(engine, trainer)."""
    if not engine_N.size:
        return None, 0
    log_ratios_N = engine_N.astype(np.float64)
    return float((np.exp(log_ratios_N) - log_ratios_N - 1.0).mean()), log_ratios_N.size
