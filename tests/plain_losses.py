"""The losses once more, as loops over single numbers, straight from their formulas: what the tests compare with.

Shares no code with `consumers/losses`. `frozen` are the log-probs as they are where a formula takes no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from consumers.losses.tokens import Denominators, LossSettings


@dataclass
class Rollout:
    """One value per sampled token, and the rollout's advantage."""

    advantage: float
    policy: list[float]
    behaviour: list[float]
    start: list[float]
    reference: list[float]
    entropy: list[float]


Gains = Callable[[Rollout, Sequence[float], Sequence[float], LossSettings], list[float]]


def bounded(x: float, low: float, high: float) -> float:
    return low if x < low else high if x > high else x


def old_of(one: Rollout, s: LossSettings) -> list[float]:
    return one.behaviour if s.correction == "ratio" else one.start


def by_ppo(one: Rollout, policy: Sequence[float], frozen: Sequence[float], s: LossSettings) -> list[float]:
    gains = []
    for p, q in zip(policy, old_of(one, s), strict=True):
        r = math.exp(p - q)
        gains.append(min(r * one.advantage, bounded(r, 1 - s.clip_low, 1 + s.clip_high) * one.advantage))
    return gains


def by_truncated_ppo(one: Rollout, policy: Sequence[float], frozen: Sequence[float], s: LossSettings) -> list[float]:
    gains = []
    for p, f, q in zip(policy, frozen, old_of(one, s), strict=True):
        r, now = math.exp(p - q), math.exp(f - q)
        t = r if now <= s.importance_cap else r * s.importance_cap / now
        gains.append(min(t * one.advantage, bounded(r, 1 - s.clip_low, 1 + s.clip_high) * one.advantage))
    return gains


def by_dual_clip(one: Rollout, policy: Sequence[float], frozen: Sequence[float], s: LossSettings) -> list[float]:
    gains = by_ppo(one, policy, frozen, s)
    return [max(gain, s.dual_clip * one.advantage) if one.advantage < 0 else gain for gain in gains]


def by_gspo(one: Rollout, policy: Sequence[float], frozen: Sequence[float], s: LossSettings) -> list[float]:
    r = math.exp(sum(p - q for p, q in zip(policy, old_of(one, s), strict=True)) / len(policy))
    gain = min(r * one.advantage, bounded(r, 1 - s.clip_low, 1 + s.clip_high) * one.advantage)
    return [gain] * len(policy)


def by_cispo(one: Rollout, policy: Sequence[float], frozen: Sequence[float], s: LossSettings) -> list[float]:
    return [
        bounded(math.exp(f - q), 1 - s.clip_low, 1 + s.clip_high) * one.advantage * p
        for p, f, q in zip(policy, frozen, old_of(one, s), strict=True)
    ]


def by_reinforce(one: Rollout, policy: Sequence[float], frozen: Sequence[float], s: LossSettings) -> list[float]:
    return [
        min(math.exp(f - q), s.importance_cap) * one.advantage * p
        for p, f, q in zip(policy, frozen, old_of(one, s), strict=True)
    ]


GAINS: dict[str, Gains] = {
    "grpo": by_truncated_ppo,
    "dr_grpo": by_truncated_ppo,
    "dapo": by_ppo,
    "ppo": by_ppo,
    "dual_clip": by_dual_clip,
    "decoupled_ppo": by_ppo,
    "gspo": by_gspo,
    "cispo": by_cispo,
    "reinforce": by_reinforce,
}


def weights(one: Rollout, s: LossSettings) -> list[float]:
    ratios = [math.exp(p - q) for p, q in zip(one.start, one.behaviour, strict=True)]
    product = math.prod(ratios)
    found = []
    for ratio in ratios:
        weight = {"ratio": 1.0, "token": ratio, "sequence": product}[s.correction]
        if s.correction != "ratio":
            weight = min(weight, s.importance_cap)
        judged = {"off": 1.0, "token": ratio, "sequence": product ** (1 / len(ratios))}[s.mask]
        found.append(weight if s.mask == "off" or s.mask_low <= judged <= s.mask_high else 0.0)
    return found


def share(name: str, length: int, d: Denominators) -> float:
    """What one token's value counts in the loss."""
    if name in ("grpo", "gspo"):
        return 1 / length / d.rollouts
    if name == "dr_grpo":
        return 1 / d.rollouts / d.max_tokens
    return 1 / d.rollouts if name == "reinforce" else 1 / d.tokens


def plain_loss(
    name: str, rollouts: Sequence[Rollout], frozen: Sequence[Sequence[float]], d: Denominators, s: LossSettings
) -> float:
    total = 0.0
    for one, still in zip(rollouts, frozen, strict=True):
        gains = GAINS[name](one, one.policy, still, s)
        for gain, weight, p, q, h in zip(gains, weights(one, s), one.policy, one.reference, one.entropy, strict=True):
            value = weight * gain
            value -= s.kl_coefficient * (math.exp(q) / math.exp(p) - (q - p) - 1)
            value += s.entropy_coefficient * h
            total -= value * share(name, len(gains), d)
    return total
