"""Advantages compare a rollout with its group, or with its batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from consumers.advantages import ADVANTAGES, advantage
from consumers.advantages.rewards import overlong
from headrace import config_trainer
from headrace.errors import ConfigError

rewards = st.lists(st.floats(-10, 10), min_size=1, max_size=16).map(np.array)
batches = st.lists(rewards, min_size=1, max_size=5)
OF_GROUP = [name for name in ADVANTAGES if name != "reinforce_pp"]


def of_group(name: str, *given: float) -> list[float]:
    (advantages_G,) = advantage(name)([np.array(given)])
    return advantages_G.tolist()


def plain(name: str, groups: list[list[float]]) -> list[list[float]]:
    """The same as loops over single numbers."""

    def spread(values: list[float]) -> float:
        mean = sum(values) / len(values)
        return (sum((value - mean) ** 2 for value in values) / len(values)) ** 0.5

    found = []
    for group in groups:
        mean = sum(group) / len(group)
        if name == "rloo":
            others = [sum(group[:i] + group[i + 1 :]) / max(1, len(group) - 1) for i in range(len(group))]
            found.append([r - other if len(group) > 1 else 0.0 for r, other in zip(group, others, strict=True)])
        elif name == "reinforce_pp":
            found.append(list(group))
        else:
            found.append([r - mean for r in group])
    if name == "grpo":
        return [[a / (spread(g) + 1e-6) for a in one] for one, g in zip(found, groups, strict=True)]
    if name.startswith("reinforce_pp"):
        everything = [a for one in found for a in one]
        mean = sum(everything) / len(everything)
        return [[(a - mean) / (spread(everything) + 1e-6) for a in one] for one in found]
    return found


@pytest.mark.parametrize("name", ADVANTAGES)
@given(given=batches)
def test_values_are_those_of_the_loops(name: str, given: list[np.ndarray]) -> None:
    groups = [np.round(rewards_G, 2) for rewards_G in given]
    expected = plain(name, [rewards_G.tolist() for rewards_G in groups])
    for one, other in zip(advantage(name)(groups), expected, strict=True):
        assert one.tolist() == pytest.approx(other, abs=1e-6)


@pytest.mark.parametrize("name", OF_GROUP)
@given(given=batches)
def test_they_sum_to_nothing_and_keep_the_order(name: str, given: list[np.ndarray]) -> None:
    for rewards_G, advantages_G in zip(given, advantage(name)(given), strict=True):
        assert advantages_G.shape == rewards_G.shape
        assert abs(advantages_G.sum()) < 1e-5
        assert (np.diff(advantages_G[np.argsort(rewards_G)]) >= 0).all()


def test_they_are_known_to_the_configuration() -> None:
    assert tuple(ADVANTAGES) == config_trainer.ADVANTAGES


def test_values() -> None:
    assert of_group("dr_grpo", 1, 0, 0, 1) == [0.5, -0.5, -0.5, 0.5]
    assert of_group("grpo", 1, 0, 0, 1) == pytest.approx([1, -1, -1, 1], rel=1e-5)
    assert of_group("rloo", 1, 0, 0) == pytest.approx([1, -0.5, -0.5])
    assert of_group("rloo", 3) == [0.0], "a group of one has nobody to compare with"


def test_reinforce_pp_compares_with_the_batch_and_its_baseline_with_the_group_first() -> None:
    groups = [np.array([1.0, 1.0]), np.array([0.0, 1.0]), np.array([0.0, 0.0])]
    plain_, baseline = advantage("reinforce_pp")(groups), advantage("reinforce_pp_baseline")(groups)
    assert np.concatenate(plain_) == pytest.approx([1, 1, -1, 1, -1, -1], rel=1e-5)
    assert np.concatenate(baseline) == pytest.approx([0, 0, -(3**0.5), 3**0.5, 0, 0], rel=1e-4)


@pytest.mark.parametrize("name", OF_GROUP)
@given(reward=st.floats(-10, 10), size=st.integers(1, 9))
def test_equal_rewards_have_no_advantage(name: str, reward: float, size: int) -> None:
    equal, other = advantage(name)([np.full(size, reward), np.array([0.0, 1.0])])
    assert not equal.any()
    assert other.any()


@pytest.mark.parametrize("name", ADVANTAGES)
def test_a_batch_of_equal_rewards_has_none_either(name: str) -> None:
    assert not any(one.any() for one in advantage(name)([np.full(3, 0.3), np.full(2, 0.3)]))


def test_the_last_tokens_before_the_end_cost_more_and_more() -> None:
    lengths = np.array([0.0, 12, 13, 14, 15, 16, 30])
    assert overlong(lengths, 16, 4, 2.0) == pytest.approx([0, 0, -0.5, -1, -1.5, -2, -2])
    assert not overlong(lengths, 16, 0, 2.0).any()


def test_ones_own_function_by_name() -> None:
    (advantages_G,) = advantage("numpy:negative")([np.array([1.0, 2.0])])
    assert advantages_G.tolist() == [-1.0, -2.0]


def test_a_module_that_breaks_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken_advantage.py").write_text("def f(:")
    with pytest.raises(ConfigError, match=r"module broken_advantage does not import \(SyntaxError: invalid syntax"):
        advantage("broken_advantage:f")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("gae", r"trainer.advantage = 'gae' is not known; use a built-in name \(dr_grpo, grpo, "),
        ("no_such_module:f", r"trainer.advantage = 'no_such_module:f': module no_such_module does not import"),
        ("numpy:no_such", r"module numpy has no object 'no_such'"),
        ("numpy:pi", r"is float, not a function"),
    ],
)
def test_a_wrong_name_is_one_sentence(name: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        advantage(name)
