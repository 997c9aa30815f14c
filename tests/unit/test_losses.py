"""Losses: values against the papers' formulas, and accumulation equal to one big batch."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from consumers.losses import LOSSES, Denominators, LossSettings, LossTokens, loss, surrogate
from headrace.errors import ConfigError

SETTINGS = LossSettings(clip_low=0.2, clip_high=0.3, importance_cap=2.0)


def one(ratio: float, advantage: float) -> tuple[float, float]:
    """Surrogate of one token, and its derivative by the log-probability."""
    logprob = torch.tensor([math.log(ratio) - 1.0], requires_grad=True)
    tokens = LossTokens(logprob, torch.tensor([-1.0]), torch.tensor([advantage]), torch.ones(1))
    value = surrogate(tokens, SETTINGS).sum()
    value.backward()
    assert logprob.grad is not None
    return float(value.detach()), float(logprob.grad[0])


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
def test_the_surrogate_of_a_token(ratio: float, advantage: float, value: float, gradient: float) -> None:
    assert one(ratio, advantage) == pytest.approx((value, gradient), rel=1e-5)


def test_grpo_averages_over_rollouts_and_dr_grpo_by_a_constant() -> None:
    zeros = torch.zeros(3)
    advantages = torch.tensor([1.0, 3.0, 3.0])
    tokens = LossTokens(zeros, zeros, advantages, torch.tensor([1.0, 2.0, 2.0]))
    denominators = Denominators(rollouts=4, tokens=5, max_tokens=10)
    assert float(loss("grpo")(tokens, denominators, SETTINGS)) == pytest.approx(-(1 + 3) / 4)
    assert float(loss("dr_grpo")(tokens, denominators, SETTINGS)) == pytest.approx(-7 / 40)


@given(seed=st.integers(0, 2**31), count=st.integers(1, 40), pieces=st.integers(1, 5))
def test_accumulation_over_microbatches_equals_one_batch(seed: int, count: int, pieces: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    policy = torch.randn(count, generator=generator) * 0.3 - 2
    columns = [
        torch.randn(count, generator=generator) * 0.3 - 2,
        torch.randn(count, generator=generator),
        torch.randint(1, 9, (count,), generator=generator).float(),
    ]
    denominators = Denominators(rollouts=count, tokens=count, max_tokens=8)
    for function in LOSSES.values():
        results = []
        for size in (count, -(-count // pieces)):
            logprobs = policy.clone().requires_grad_()
            total = 0.0
            for chunk in torch.arange(count).split(size):
                part = LossTokens(logprobs[chunk], *(column[chunk] for column in columns))
                value = function(part, denominators, SETTINGS)
                value.backward()
                total += float(value.detach())
            results.append((total, logprobs.grad))
        assert results[0][0] == pytest.approx(results[1][0], abs=1e-6)
        torch.testing.assert_close(results[0][1], results[1][1], atol=1e-6, rtol=0)


def test_an_unknown_loss_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"trainer.loss = 'ppo' is not known; use one of grpo, dr_grpo"):
        loss("ppo")
