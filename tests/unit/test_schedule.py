"""The learning rate of each step: warm-up, then constant, linear or cosine."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from consumers.schedule import learning_rate
from headrace.config import Config
from headrace.config_trainer import TrainerConfig


def rates(steps: int, **settings: object) -> list[float]:
    config = TrainerConfig.model_validate({"learning_rate": 1e-3, **settings})
    return [learning_rate(config, step, steps) for step in range(steps)]


def test_warm_up_is_linear_then_constant() -> None:
    assert rates(6, warmup_steps=4) == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3, 1e-3])
    assert rates(2) == [1e-3, 1e-3]


def test_a_linear_schedule_falls_by_equal_parts_to_its_end() -> None:
    assert rates(5, schedule="linear") == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4, 0])
    found = rates(6, schedule="linear", warmup_steps=2, final_learning_rate=2e-4)
    assert found == pytest.approx([5e-4, 1e-3, 8e-4, 6e-4, 4e-4, 2e-4])


def test_a_cosine_falls_slowly_at_both_ends() -> None:
    found = rates(5, schedule="cosine", final_learning_rate=1e-4)
    by_hand = [1e-4 + 9e-4 * (1 + math.cos(math.pi * part / 4)) / 2 for part in range(5)]
    assert found == pytest.approx(by_hand)
    assert found[0] == pytest.approx(1e-3)
    assert found[-1] == pytest.approx(1e-4)
    assert found[0] - found[1] < found[1] - found[2]


@given(st.integers(1, 40), st.integers(0, 50), st.sampled_from(["constant", "linear", "cosine"]), st.floats(0.0, 1e-3))
def test_it_grows_up_to_the_warm_up_and_never_after_it(steps: int, warmup: int, schedule: str, final: float) -> None:
    found = rates(steps, warmup_steps=warmup, schedule=schedule, final_learning_rate=final)
    top = max(0, warmup - 1)
    assert all(0 <= rate <= 1e-3 * (1 + 1e-12) for rate in found)
    assert found[: top + 1] == sorted(found[: top + 1])
    assert found[top:] == pytest.approx(sorted(found[top:], reverse=True))
    if steps > warmup + 1 and schedule != "constant":
        assert found[-1] == pytest.approx(final)


def test_steps_that_a_longer_run_adds_stay_at_the_end() -> None:
    config = TrainerConfig(schedule="linear", learning_rate=1e-3, final_learning_rate=1e-5)
    assert learning_rate(config, 12, 10) == 1e-5


def test_an_end_above_the_start_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"trainer.final_learning_rate: 0.1 is above trainer.learning_rate"):
        Config.model_validate({"trainer": {"schedule": "linear", "final_learning_rate": 0.1}})
