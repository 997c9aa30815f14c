"""Every dataset of reasoning_gym: a task, a wrong and a right answer, both scored; and levels of their curricula."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.config import EnvironmentConfig
from headrace.errors import EnvironmentLoadError
from producers.environments.api import Done, Environment, Rollout, Turn
from producers.environments.pass_rates import Measured, write_pass_rates
from producers.environments.registry import build_environment
from tests.reasoning_gym_solutions import SOLVERS, right_answer

HERE = all(importlib.util.find_spec(name) for name in ("reasoning_gym", "pycosat"))
# One requirement is compiled: where there is no compiler nobody can install it.
if not HERE and not (os.environ.get("HEADRACE_TEST_ALL_SERVERS") and shutil.which("cc")):
    pytest.skip("`make reasoning-gym` installs what this needs, given a C compiler", allow_module_level=True)
pytestmark = [
    # What the package leaves open, and what its numpy warns of when an answer is not a matrix.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:loadtxt"),
]

from reasoning_gym.factory import CURRICULA, DATASETS  # noqa: E402

OPTIONS: dict[str, dict[str, Any]] = {
    "composite": {"datasets": [{"name": "chain_sum", "weight": 2.0}, {"name": "leg_counting"}]},
    "knight_swap": {"max_nodes": 6},
    "rush_hour": {"min_moves": 1, "max_moves": 5},
}
WRONG = "this is no answer"
SLOW_LEVELS = {"sokoban", "decimal_arithmetic", "arc_agi", "group_anagrams"}
"""Take seconds for one question at their lowest level: sokoban searches until it finds one."""
BROKEN_LEVELS = {"knight_swap"}
"""Its lowest level is refused by its own check."""


def gym(dataset: str, **options: Any) -> Environment:
    return build_environment(EnvironmentConfig(name="reasoning_gym", options={"dataset": dataset, **options}))


def played(environment: Environment, completion: Callable[[Any], str], index: int = 0) -> Rollout:
    """One episode with this completion, as it arrives where it is scored."""

    async def play() -> Rollout:
        episode = environment.episode("train", index, 0)
        prompt = (await episode.reset()).messages[0].content
        turn = Turn(completion(episode.answer), "stop")
        assert await episode.step(turn) == Done()
        return Rollout("reasoning_gym", index, prompt, turn.text, (turn,), episode.answer, "stop")

    rollout: Rollout = pickle.loads(pickle.dumps(asyncio.run(play())))
    return rollout


def test_the_package_is_known_as_a_whole() -> None:
    assert len(DATASETS) >= 106
    assert set(SOLVERS) < set(DATASETS)


@pytest.mark.parametrize("name", sorted(DATASETS))
def test_a_task_a_wrong_answer_and_a_right_one(name: str) -> None:
    environment = gym(name, size=2, eval_size=1, seed=7, **OPTIONS.get(name, {}))
    wrong = played(environment, lambda entry: WRONG)
    assert wrong.prompt
    assert 0 <= asyncio.run(environment.score(wrong)) < 1
    assert not environment.correct(wrong)
    right = played(environment, lambda entry: right_answer(entry["metadata"].get("source_dataset", name), entry))
    assert asyncio.run(environment.score(right)) == 1.0
    assert environment.correct(right)


@pytest.mark.parametrize("name", sorted(set(CURRICULA) - SLOW_LEVELS - BROKEN_LEVELS))
def test_the_lowest_level_of_each_curriculum(name: str) -> None:
    environment = gym(name, size=1, eval_size=1, seed=3, curriculum=0, **OPTIONS.get(name, {}))
    assert played(environment, lambda entry: WRONG).prompt


def test_levels_by_attribute() -> None:
    easy = gym("chain_sum", size=30, curriculum=0)
    hard = gym("chain_sum", size=30, curriculum={"*": 0, "num_digits": 3}, min_terms=2, max_terms=2)
    digits = [len(played(hard, lambda entry: WRONG, index).prompt) for index in range(30)]
    assert max(digits) > max(len(played(easy, lambda entry: WRONG, index).prompt) for index in range(30))
    assert {environment_terms(hard, index) for index in range(30)} == {2}


def environment_terms(environment: Environment, index: int) -> int:
    return int(environment.episode("train", index, 0).answer["metadata"]["num_terms"])


def test_several_levels_take_turns() -> None:
    environment = gym("chain_sum", size=9, eval_size=3, curriculum=[{"num_terms": level} for level in (0, 1, 2)])
    assert len(environment) == 9
    assert [environment.episode("train", index, 0).answer["level"] for index in range(9)] == [0, 1, 2] * 3
    for index in range(9):
        assert environment.correct(played(environment, lambda entry: entry["answer"], index))
    assert environment.eval_size() == 3


def test_levels_outside_of_the_wanted_pass_rate_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "rates.jsonl"
    rates = [1.0, 0.6, 0.0, 0.9, 0.4, 0.1]
    write_pass_rates(file, (Measured(index, rate, 4) for index, rate in enumerate(rates)))
    options = {"size": 9, "curriculum": [0, 1, 2], "pass_rates": str(file), "pass_rate": [0.2, 0.8]}
    environment = gym("chain_sum", **options)
    assert [environment.episode("train", index, 0).answer["level"] for index in range(len(environment))] == [1, 1, 1]


def test_questions_outside_of_the_wanted_pass_rate_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "rates.jsonl"
    write_pass_rates(file, [Measured(0, 1.0), Measured(1, 0.5), Measured(2, 0.0)])
    every = gym("chain_sum", size=5)
    kept = gym("chain_sum", size=5, pass_rates=str(file), pass_rate=[0.2, 0.8])
    questions = [every.episode("train", index, 0).answer["question"] for index in range(5)]
    assert [kept.episode("train", index, 0).answer["question"] for index in range(3)] == [
        questions[i] for i in (1, 3, 4)
    ]
    assert len(kept) == 3


def test_a_composite_has_its_parts_by_weight_and_level() -> None:
    parts = [
        {"name": "chain_sum", "weight": 3, "curriculum": 1},
        {"name": "game_of_life_halting", "options": {"grid_size_x": 12}},
    ]
    environment = gym("composite", size=200, datasets=parts)
    names = [environment.episode("train", index, 0).answer["metadata"]["source_dataset"] for index in range(200)]
    assert 100 < names.count("chain_sum") < 190
    halting = names.index("game_of_life_halting")
    assert environment.correct(played(environment, lambda entry: str(entry["answer"]), halting))
    assert not environment.correct(played(environment, lambda entry: WRONG, halting))


def test_an_answer_that_a_dataset_cannot_read_is_wrong_and_a_broken_dataset_is_an_error() -> None:
    environment = gym("prime_factorization", size=1)
    assert asyncio.run(environment.score(played(environment, lambda entry: "two and five"))) == 0.0
    rollout = played(environment, lambda entry: "two and five")
    rollout.answer["answer"] = "broken"
    with pytest.raises(ValueError, match=r"broken|invalid literal"):
        asyncio.run(environment.score(rollout))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"dataset": "acre", "curriculum": 0}, "dataset 'acre' has no curriculum"),
        ({"dataset": "chain_sum", "curriculum": {"dogs": 1}}, "has no attribute dogs, only num_"),
        ({"dataset": "chain_sum", "curriculum": {"num_terms": 99}}, "has no such level: Invalid level: 99"),
        ({"dataset": "chain_sum", "curriculum": -1}, "a level is a number from 0"),
        ({"dataset": "chain_sum", "curriculum": []}, "is not from 1 to size"),
        (
            {"dataset": "knight_swap", "curriculum": 0},
            "'knight_swap' (refuses its options|has no such level): min_nodes",
        ),
        ({"dataset": "chain_sum", "datasets": [{"name": "acre"}]}, "belong to dataset = 'composite'"),
        ({"dataset": "composite", "datasets": [{"weight": 1}]}, "a part has a name"),
        ({"dataset": "composite", "datasets": [{"name": "acre", "size": 1}]}, "a part has a name"),
        ({"dataset": "composite"}, "refuses its options"),
        ({"dataset": "chain_sum", "pass_rate": [0, 0.5]}, "need pass_rates"),
    ],
)
def test_bad_levels_and_parts_are_one_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(EnvironmentLoadError, match=sentence):
        gym(**options)
