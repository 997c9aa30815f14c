"""Losses: against loops over single numbers, their gradients against differences, in any order and split."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from consumers.losses import LOSSES, method
from consumers.losses.correction import correction
from consumers.losses.ratios import truncated_gain
from consumers.losses.tokens import Denominators, LossSettings, LossTokens
from headrace import config_trainer
from headrace.config_trainer import TrainerConfig
from headrace.errors import ConfigError
from tests.plain_losses import GAINS, Rollout, plain_loss

NAMES = sorted(LOSSES)
TOLERANCE = 1e-6


def made(seed: int, spread: float = 0.5) -> list[Rollout]:
    """Up to five rollouts of up to six tokens; policies differ from each other by about `spread`."""
    rng = random.Random(seed)
    rollouts = []
    for _ in range(rng.randint(1, 5)):
        behaviour = [-abs(rng.gauss(2, 1)) for _ in range(rng.randint(1, 6))]
        near = [[value + rng.gauss(0, spread) for value in behaviour] for _ in range(3)]
        entropy = [rng.uniform(0, 3) for _ in behaviour]
        advantage = rng.choice([0.0, rng.gauss(0, 1), rng.gauss(0, 1)])
        rollouts.append(Rollout(advantage, near[0], behaviour, near[1], near[2], entropy))
    return rollouts


def denominators(rollouts: Sequence[Rollout]) -> Denominators:
    """As if others had been left out for want of an advantage."""
    return Denominators(len(rollouts) + 2, sum(len(one.policy) for one in rollouts) + 7, 11)


def tokens(rollouts: Sequence[Rollout], chosen: LossSettings, order: Sequence[int] | None = None) -> LossTokens:
    """Of all rollouts in float64, their tokens in the given order."""
    columns: dict[str, list[float]] = {
        "logprobs_N": [value for one in rollouts for value in one.policy],
        "behaviour_N": [value for one in rollouts for value in one.behaviour],
        "start_N": [value for one in rollouts for value in one.start],
        "reference_N": [value for one in rollouts for value in one.reference],
        "entropy_N": [value for one in rollouts for value in one.entropy],
        "advantages_N": [one.advantage for one in rollouts for _ in one.policy],
        "lengths_N": [float(len(one.policy)) for one in rollouts for _ in one.policy],
    }
    rollouts_N = torch.tensor([number for number, one in enumerate(rollouts) for _ in one.policy])
    place = torch.arange(len(rollouts_N)) if order is None else torch.tensor(order)
    found = {name: torch.tensor(values, dtype=torch.float64)[place] for name, values in columns.items()}
    start_N, rollouts_N = found.pop("start_N"), rollouts_N[place]
    weights_N = correction(start_N, found["behaviour_N"], rollouts_N, found["lengths_N"], chosen)
    old_N = found["behaviour_N"] if chosen.correction == "ratio" else start_N
    found["logprobs_N"].requires_grad_()
    found["entropy_N"].requires_grad_()
    return LossTokens(rollouts_N=rollouts_N, old_N=old_N, weights_N=weights_N, **found)


def evaluated(
    name: str, rollouts: Sequence[Rollout], d: Denominators, chosen: LossSettings, order: Sequence[int] | None = None
) -> tuple[float, torch.Tensor, torch.Tensor]:
    """Value, and gradients by log-prob and by entropy in the order of the rollouts."""
    given = tokens(rollouts, chosen, order)
    value = LOSSES[name].loss(given, d, chosen)
    value.backward()
    place = torch.arange(given.lengths_N.numel()) if order is None else torch.tensor(order).argsort()
    assert given.entropy_N is not None
    gradients = [
        torch.zeros(place.numel(), dtype=torch.float64) if leaf.grad is None else leaf.grad[place]
        for leaf in (given.logprobs_N, given.entropy_N)
    ]
    return float(value.detach()), gradients[0], gradients[1]


@st.composite
def chosen_settings(draw: st.DrawFn) -> LossSettings:
    return LossSettings(
        clip_low=draw(st.sampled_from([0.0003, 0.2, 1.0])),
        clip_high=draw(st.sampled_from([0.0004, 0.28, 1.0])),
        dual_clip=draw(st.sampled_from([1.5, 3.0])),
        importance_cap=draw(
            st.sampled_from([0.7, 1.5, 2.5])
        ),  # at 1 + clip_high two terms would be one, with two slopes
        correction=draw(st.sampled_from(["ratio", "token", "sequence"])),
        mask=draw(st.sampled_from(["off", "token", "sequence"])),
        mask_low=draw(st.sampled_from([0.0, 0.5, 0.9])),
        mask_high=draw(st.sampled_from([1.1, 2.0, 1e12])),
        kl_coefficient=draw(st.sampled_from([0.0, 0.3])),
        entropy_coefficient=draw(st.sampled_from([0.0, 0.1])),
    )


def test_each_loss_has_its_loop_and_is_known_to_the_configuration() -> None:
    assert sorted(GAINS) == sorted(config_trainer.LOSSES) == NAMES


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=100)
@given(seed=st.integers(0, 2**31), chosen=chosen_settings())
def test_the_value_is_that_of_the_loop(name: str, seed: int, chosen: LossSettings) -> None:
    rollouts = made(seed)
    d = denominators(rollouts)
    expected = plain_loss(name, rollouts, [one.policy for one in rollouts], d, chosen)
    assert evaluated(name, rollouts, d, chosen)[0] == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=30)
@given(seed=st.integers(0, 2**31), chosen=chosen_settings())
def test_the_gradient_is_a_difference_of_the_loop(name: str, seed: int, chosen: LossSettings) -> None:
    rollouts = made(seed)
    d = denominators(rollouts)
    frozen = [list(one.policy) for one in rollouts]
    _, by_logprob, by_entropy = evaluated(name, rollouts, d, chosen)
    width, at = 1e-6, 0
    for number, one in enumerate(rollouts):
        for place in range(len(one.policy)):
            for column, gradient in (("policy", by_logprob), ("entropy", by_entropy)):
                sides = []
                for step in (width, -width):
                    moved = copy.deepcopy(rollouts)
                    getattr(moved[number], column)[place] += step
                    sides.append(plain_loss(name, moved, frozen, d, chosen))
                difference = (sides[0] - sides[1]) / (2 * width)
                assert float(gradient[at]) == pytest.approx(difference, abs=TOLERANCE)
            at += 1


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40)
@given(seed=st.integers(0, 2**31), chosen=chosen_settings(), pieces=st.integers(1, 4))
def test_order_and_splits_between_microbatches_and_ranks_change_nothing(
    name: str, seed: int, chosen: LossSettings, pieces: int
) -> None:
    rollouts, rng = made(seed), random.Random(seed)
    d = denominators(rollouts)
    whole = evaluated(name, rollouts, d, chosen)

    order = list(range(sum(len(one.policy) for one in rollouts)))
    rng.shuffle(order)
    for one, other in zip(whole, evaluated(name, rollouts, d, chosen, order), strict=True):
        torch.testing.assert_close(torch.as_tensor(one), torch.as_tensor(other), atol=1e-12, rtol=1e-12)

    share = [rng.randrange(pieces) for _ in rollouts]
    parts = [
        evaluated(name, mine, d, chosen)
        for piece in range(pieces)
        if (mine := [one for one, place in zip(rollouts, share, strict=True) if place == piece])
    ]
    assert sum(value for value, _, _ in parts) == pytest.approx(whole[0], abs=1e-12)
    by_rollout = torch.split(whole[1], [len(one.policy) for one in rollouts])
    regrouped = [by_rollout[i] for piece in range(pieces) for i, place in enumerate(share) if place == piece]
    torch.testing.assert_close(
        torch.cat([gradient for _, gradient, _ in parts]), torch.cat(regrouped), atol=1e-12, rtol=1e-12
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_rollout_without_advantage_has_no_gradient(name: str) -> None:
    rollouts = [replace(one, advantage=0.0) for one in made(3)]
    value, by_logprob, _ = evaluated(name, rollouts, denominators(rollouts), LossSettings())
    assert value == 0.0
    assert not by_logprob.any()


@pytest.mark.parametrize("name", NAMES)
def test_on_the_policy_every_loss_is_the_policy_gradient(name: str) -> None:
    """All ratios are 1: what is left is the advantage, by the loss's own average."""
    one = Rollout(-1.5, [-1.0, -2.0], [-1.0, -2.0], [-1.0, -2.0], [-1.0, -2.0], [0.0, 0.0])
    d = Denominators(rollouts=4, tokens=10, max_tokens=5)
    _, by_logprob, _ = evaluated(name, [one], d, LOSSES[name].settings(TrainerConfig()))
    average = {"grpo": 1 / 8, "gspo": 1 / 8, "dr_grpo": 1 / 20, "reinforce": 1 / 4}.get(name, 1 / 10)
    assert by_logprob.tolist() == pytest.approx([1.5 * average] * 2)


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "gradient"),
    [
        (1.0, 2.0, 2.0, 2.0),
        (1.1, 1.0, 1.1, 1.1),
        (1.5, 1.0, 1.3, 0.0),  # clipped above
        (0.5, 1.0, 0.5, 0.5),
        (0.5, -1.0, -0.8, 0.0),  # clipped below
        (1.5, -1.0, -1.5, -1.5),
        (8.0, -1.0, -2.0, -2.0),  # truncated, with a gradient of the cap
    ],
)
def test_the_truncated_gain_of_a_token(ratio: float, advantage: float, value: float, gradient: float) -> None:
    logprob = torch.tensor([math.log(ratio) - 1.0], requires_grad=True)
    behaviour, one = torch.tensor([-1.0]), torch.ones(1)
    zero = torch.zeros(1, dtype=torch.int64)
    given = LossTokens(logprob, behaviour, torch.tensor([advantage]), one, zero, behaviour, one)
    gain = truncated_gain(given, LossSettings(clip_high=0.3)).sum()
    gain.backward()
    assert logprob.grad is not None
    assert (float(gain.detach()), float(logprob.grad[0])) == pytest.approx((value, gradient), rel=1e-5)


def test_auto_is_what_a_loss_is_published_with_and_a_number_is_that_number() -> None:
    def bounds(name: str, **given: object) -> tuple[float, float, str]:
        chosen = LOSSES[name].settings(TrainerConfig.model_validate(given))
        return chosen.clip_low, chosen.clip_high, chosen.correction

    assert bounds("grpo") == (0.2, 0.2, "ratio")
    assert bounds("dapo") == (0.2, 0.28, "ratio")
    assert bounds("gspo") == (3e-4, 4e-4, "ratio")
    assert bounds("decoupled_ppo") == (0.2, 0.2, "token")
    assert bounds("dapo", clip_high=0.5, clip_low=0.1, correction="sequence") == (0.1, 0.5, "sequence")


def test_a_long_rollout_far_from_its_sampler_is_truncated_and_no_overflow() -> None:
    start, behaviour = torch.full((9000,), -1.0), torch.full((9000,), -2.0)
    rollouts, lengths = torch.zeros(9000, dtype=torch.int64), torch.full((9000,), 9000.0)
    for chosen in (LossSettings(correction="sequence"), LossSettings(correction="token")):
        assert correction(start, behaviour, rollouts, lengths, chosen).unique().tolist() == [2.0]
    masked = LossSettings(correction="sequence", mask="sequence")
    assert not correction(start, behaviour, rollouts, lengths, masked).any(), "e is above mask_high"


def test_an_unknown_loss_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"trainer.loss = 'pqo' is not known \(did you mean 'ppo'\?\); use a"):
        method("pqo")


def test_ones_own_loss_by_name() -> None:
    own = method("consumers.losses.ppo:ppo")
    assert own.loss is LOSSES["ppo"].loss
    assert own.settings(TrainerConfig()) == LossSettings()
