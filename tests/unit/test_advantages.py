"""Advantages compare a rollout with its group."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from consumers.advantages import ADVANTAGES, advantage
from headrace.errors import ConfigError

rewards = st.lists(st.floats(-10, 10), min_size=1, max_size=16).map(np.array)


@given(rewards)
def test_they_sum_to_nothing_and_keep_the_order(rewards_G: np.ndarray) -> None:
    for name in ADVANTAGES:
        advantages_G = advantage(name)(rewards_G)
        assert advantages_G.shape == rewards_G.shape
        assert abs(advantages_G.sum()) < 1e-6
        assert (np.diff(advantages_G[np.argsort(rewards_G)]) >= 0).all()


def test_values() -> None:
    rewards_G = np.array([1.0, 0.0, 0.0, 1.0])
    assert advantage("dr_grpo")(rewards_G).tolist() == [0.5, -0.5, -0.5, 0.5]
    assert advantage("grpo")(rewards_G) == pytest.approx([1, -1, -1, 1], rel=1e-5)


@given(st.floats(-10, 10), st.integers(1, 9))
def test_equal_rewards_have_no_advantage(reward: float, size: int) -> None:
    for name in ADVANTAGES:
        assert not advantage(name)(np.full(size, reward)).any()


def test_ones_own_function_by_name() -> None:
    assert advantage("numpy:negative") is np.negative


def test_a_module_that_breaks_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken_advantage.py").write_text("def f(:")
    with pytest.raises(ConfigError, match=r"module broken_advantage does not import \(SyntaxError: invalid syntax"):
        advantage("broken_advantage:f")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("gae", r"trainer.advantage = 'gae' is not known; use one of grpo, dr_grpo or package.module:object"),
        ("no_such_module:f", r"trainer.advantage = 'no_such_module:f': module no_such_module does not import"),
        ("numpy:no_such", r"module numpy has no object 'no_such'"),
        ("numpy:pi", r"is float, not a function"),
    ],
)
def test_a_wrong_name_is_one_sentence(name: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        advantage(name)
