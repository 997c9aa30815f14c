"""A loss that takes its time: a trainer's step is then as long on any machine, however busy it is."""

from __future__ import annotations

import time

import torch

from consumers.losses.grpo import grpo
from consumers.losses.tokens import Denominators, LossSettings, LossTokens

PAUSE_S = 0.5


def paused(tokens: LossTokens, denominators: Denominators, settings: LossSettings) -> torch.Tensor:
    time.sleep(PAUSE_S)
    return grpo(tokens, denominators, settings)
