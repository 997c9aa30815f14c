"""The learning rate of a step. Pure."""

from __future__ import annotations

import math

from headrace.config_trainer import TrainerConfig


def learning_rate(config: TrainerConfig, step: int, steps: int) -> float:
    """Of step `step`, counted from 0, of `steps`.

    It grows linearly over `warmup_steps`, reaches `learning_rate` at the last of them, and then stays, or falls
    linearly or as half a cosine to `final_learning_rate` at the last step (Loshchilov and Hutter, 2016,
    arXiv:1608.03983, without restarts).
    """
    full, final = config.learning_rate, config.final_learning_rate
    if step < config.warmup_steps:
        return full * ((step + 1) / config.warmup_steps)
    if config.schedule == "constant":
        return full
    first = max(0, config.warmup_steps - 1)
    done = min(1.0, (step - first) / max(1, steps - 1 - first))
    left = 1.0 - done if config.schedule == "linear" else (1.0 + math.cos(math.pi * done)) / 2
    return final + (full - final) * left
