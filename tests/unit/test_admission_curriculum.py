"""The curriculum: the same prompts for a seed, to each environment its share, and no index is missed."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from consumers.curriculum import (
    Curriculum,
    Prompt,
    Source,
    check_held_out,
    held_out_of,
    held_out_task,
    shuffled,
    sources_of,
)
from consumers.shares import LONGEST_CYCLE, counts, order, shares
from headrace.config import Config
from headrace.errors import ConfigError
from headrace.version import PolicyVersion

FIRST = PolicyVersion(1, 0)

weights = st.sampled_from([0.0, 1.0, 1.0, 2.0, 3.0, 0.5, 0.125, 10.0, 1 / 3, 0.7231])
"""Of one environment; some cycles are short and exact, some have to be rounded."""


@st.composite
def wishes(draw: st.DrawFn) -> tuple[list[float], list[float]]:
    """Weights and least shares as the configuration accepts them."""
    number = draw(st.integers(1, 6))
    weight = draw(st.lists(weights, min_size=number, max_size=number).filter(any))
    tenths = draw(st.lists(st.integers(0, 10), min_size=number, max_size=number).filter(lambda parts: sum(parts) <= 10))
    return weight, [part / 10 for part in tenths]


@given(wishes())
def test_shares_keep_the_least_and_leave_the_rest_in_proportion(wish: tuple[list[float], list[float]]) -> None:
    weight, least = wish
    exact = shares(weight, least)
    assert sum(exact) == 1
    for share, floor in zip(exact, least, strict=True):
        assert share >= Fraction(repr(floor))
    free = [i for i, share in enumerate(exact) if share > Fraction(repr(least[i]))]
    per_weight = {share / Fraction(repr(weight[i])) for i, share in enumerate(exact) if i in free}
    assert len(per_weight) <= 1, "those above their least share are in proportion to their weights"
    for i, share in enumerate(exact):
        if i not in free and per_weight:
            assert share >= Fraction(repr(weight[i])) * max(per_weight), "nobody was raised that need not be"


@given(wishes())
def test_in_every_prefix_each_is_within_one_of_its_share(wish: tuple[list[float], list[float]]) -> None:
    exact = shares(*wish)
    counted = counts(exact, 300)
    length = sum(counted)
    assert all(abs(count - share * length) < 1 for count, share in zip(counted, exact, strict=True))
    had = [0] * len(counted)
    for place, turn in enumerate(order(counted), 1):
        had[turn] += 1
        assert all(abs(so_far * length - place * count) < length for so_far, count in zip(had, counted, strict=True))
    assert had == counted


def test_shares_are_exact_where_a_cycle_holds_them() -> None:
    assert counts(shares([1, 1, 1], [0, 0, 0])) == [1, 1, 1]
    assert counts(shares([5, 1, 0], [0, 0.25, 0.1])) == [13, 5, 2]
    assert counts(shares([0.7, 0.3], [0, 0])) == [7, 3]
    assert sum(counts(shares([1, 3.14159265], [0, 0]))) == LONGEST_CYCLE


def test_without_bursts() -> None:
    assert order([4, 2, 2]) == [0, 1, 2, 0, 0, 1, 2, 0]


@given(wishes(), st.lists(st.integers(1, 7), min_size=6, max_size=6))
def test_each_environment_goes_through_its_indices_without_gaps(
    wish: tuple[list[float], list[float]], sizes: list[int]
) -> None:
    sources = [Source(f"e{i}", sizes[i], weight, least) for i, (weight, least) in enumerate(zip(*wish, strict=True))]
    asked: dict[str, list[int]] = {source.environment: [] for source in sources}
    for _, name, index, _ in _tasks(Curriculum(7, sources), 200):
        asked[name].append(index)
    for source in sources:
        indices = asked[source.environment]
        for first in range(0, len(indices) - source.size + 1, source.size):
            assert sorted(indices[first : first + source.size]) == list(range(source.size)), "each epoch has each once"
        assert max(Counter(indices).values(), default=0) <= -(-len(indices) // source.size)


@given(st.integers(0, 10**9), st.integers(0, 16))
def test_the_prompt_stands_in_its_task_id(number: int, again: int) -> None:
    prompt = Prompt(number, again)
    assert Prompt.of(prompt.task_id) == prompt
    assert prompt.next.task_id == f"train-{number:08d}.{again + 1}"
    assert Prompt(number).task_id == f"train-{number:08d}"


@pytest.mark.parametrize("task_id", ["eval-before-1-000001", "train-1", "train-00000001.", "", "train-00000001.x"])
def test_other_ids_name_no_prompt(task_id: str) -> None:
    assert Prompt.of(task_id) is None


def test_asked_again_a_prompt_is_the_same_but_for_its_id() -> None:
    curriculum = Curriculum(3, (Source("sums", 5),))
    versions = {"group_size": 2, "deadline_ms": 1, "formed": 0}
    first = curriculum.task(Prompt(4), min_version=FIRST, **versions)
    again = curriculum.task(Prompt(4).next, min_version=FIRST, **versions)
    assert (first.index, first.seed, first.environment) == (again.index, again.seed, again.environment)
    assert (first.task_id, again.task_id) == ("train-00000004", "train-00000004.1")


def test_a_run_asks_by_label_and_may_evaluate_on_what_it_does_not_train_on() -> None:
    environments = [{"name": "arithmetic", "label": "a"}, {"name": "arithmetic", "label": "b", "weight": 0}]
    evaluation = {"environment": "b", "prompts": 2}
    config = Config.model_validate({"environments": environments, "evaluation": evaluation})
    sizes = {"train/a": 3, "eval/a": 1, "train/b": 0, "eval/b": 4}
    sources = sources_of(config, sizes)
    assert {name for _, name, *_ in _tasks(Curriculum(0, sources), 9)} == {"a"}
    assert held_out_of(config, sizes) == (Source("b", 4),)
    both = Config.model_validate(
        {"environments": environments, "evaluation": {**evaluation, "environment": ["b", "a"]}}
    )
    assert held_out_of(both, sizes) == (Source("b", 4), Source("a", 1))
    with pytest.raises(ConfigError, match="does not say how many prompts train/b has"):
        sources_of(config, {"train/a": 3})


@given(size=st.integers(1, 300), key=st.text(max_size=5))
def test_shuffling_is_a_permutation(size: int, key: str) -> None:
    assert sorted(shuffled(position, size, key) for position in range(size)) == list(range(size))


def test_shuffling_differs_by_key_and_does_shuffle() -> None:
    orders = [[shuffled(position, 100, key) for position in range(100)] for key in ("a", "b")]
    assert orders[0] != orders[1]
    assert all(sum(i == place for i, place in enumerate(order)) < 10 for order in orders)


def _tasks(curriculum: Curriculum, count: int) -> list[tuple[str, str, int, int]]:
    made = [curriculum.task(Prompt(n), group_size=2, min_version=FIRST, deadline_ms=1, formed=0) for n in range(count)]
    return [(task.task_id, task.environment, task.index, task.seed) for task in made]


def test_environments_take_turns_and_each_epoch_visits_every_index_once() -> None:
    sources = (Source("sums", 5), Source("logic", 3))
    tasks = _tasks(Curriculum(7, sources), 30)
    assert tasks == _tasks(Curriculum(7, sources), 30)
    assert [name for _, name, _, _ in tasks[:4]] == ["sums", "logic", "sums", "logic"]
    sums = [index for _, name, index, _ in tasks if name == "sums"]
    assert sorted(sums[:5]) == sorted(sums[5:10]) == list(range(5))
    assert len({task_id for task_id, *_ in tasks}) == len({seed for *_, seed in tasks}) == 30
    assert tasks != _tasks(Curriculum(8, sources), 30)


def test_an_environment_without_prompts_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'sums' has no training prompts"):
        Curriculum(0, (Source("sums", 0),))


def test_all_evaluations_of_a_seed_ask_the_same() -> None:
    asked = {
        version: held_out_task("eval", "sums", 3, seed=3, group_size=5, version=version, deadline_ms=1)
        for version in (FIRST, PolicyVersion(1, 9))
    }
    assert all(task.kind == "eval" and task.min_version == version for version, task in asked.items())
    assert len({(task.index, task.seed, task.group_size) for task in asked.values()}) == 1
    other = held_out_task("eval", "sums", 3, seed=4, group_size=5, version=FIRST, deadline_ms=1)
    assert other.seed != asked[FIRST].seed


def test_more_held_out_prompts_than_there_are_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"evaluation.prompts = 5: environment 'sums' has only 4 held-out prompts"):
        check_held_out(Source("sums", 4), 5)
