"""Losses: pure functions of named tensors, one value per sampled token, with the denominators passed in.

A loss is a sum over tokens divided by numbers of *all* that an optimizer update uses. Its value and gradient over one
big batch therefore equal the sums over any split into microbatches and ranks that leaves rollouts whole. Rollouts
without advantage can stay away, unless there is a KL penalty or an entropy bonus: their terms are zero, while the
denominators still count them.

Ratios compare with the policy that sampled the token, up to `max_lag` steps older, or with the one that begins the
step (`trainer.correction`). Log-probabilities are of the sampling distribution at its temperature; where top-p or top-k
cut the behaviour distribution, its log-probabilities were renormalised over what was left, so that the ratio is too low
by the mass that was cut away.
"""

from __future__ import annotations

from consumers.losses.cispo import cispo
from consumers.losses.dapo import dapo
from consumers.losses.decoupled_ppo import decoupled_ppo
from consumers.losses.dr_grpo import dr_grpo
from consumers.losses.dual_clip import dual_clip
from consumers.losses.grpo import grpo
from consumers.losses.gspo import gspo
from consumers.losses.ppo import ppo
from consumers.losses.reinforce import reinforce
from consumers.losses.tokens import Method
from headrace.errors import ConfigError
from headrace.objects import load_function

LOSSES: dict[str, Method] = {
    "grpo": Method(grpo),
    "dr_grpo": Method(dr_grpo),
    "dapo": Method(dapo, clip_high=0.28),
    "ppo": Method(ppo),
    "dual_clip": Method(dual_clip),
    "decoupled_ppo": Method(decoupled_ppo, correction="token"),
    "gspo": Method(gspo, clip_low=3e-4, clip_high=4e-4, by_rollout=True),
    # No lower bound, as published; the upper one is not, and is that of `importance_cap` here.
    "cispo": Method(cispo, clip_low=1.0, clip_high=1.0),
    "reinforce": Method(reinforce),
}


def method(name: str) -> Method:
    """By name, or one's own loss as `package.module:object`. Raises ConfigError."""
    if name in LOSSES:
        return LOSSES[name]
    return Method(load_function(name, f"trainer.loss = {name!r}", ConfigError, LOSSES))
