"""Rewards of a group: whether they say anything, and what a rollout loses that is nearly too long."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]

EPSILON = 1e-6
"""Added to standard deviations; spreads below it are noise of floating point, not a preference."""


def equal(rewards_G: Float64) -> bool:
    """Whether the rewards prefer no member."""
    return float(np.ptp(rewards_G)) <= EPSILON


def overlong(lengths_G: Float64, longest: int, buffer: int, penalty: float) -> Float64:
    """[G]: what is added to the rewards of rollouts of these sampled tokens.

    0 up to longest - buffer tokens, from there linearly down to -penalty at `longest`, and no less beyond it: Yu et
    al., 2025, DAPO (arXiv:2503.14476), equation 13. A buffer of 0 adds nothing.
    """
    if not buffer:
        return np.zeros_like(lengths_G)
    into_G = (lengths_G - (longest - buffer)) / buffer
    shaped: Float64 = -penalty * into_G.clip(0.0, 1.0)
    return shaped
