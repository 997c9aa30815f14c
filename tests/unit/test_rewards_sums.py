"""Weighted sums, the forms in which a reward is given, and what services are asked."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from headrace.config import EnvironmentConfig, RewardConfig
from producers.environments.api import Rollout
from producers.rewards.formats import BadAnswer, encoded, request, values_of
from producers.rewards.gathering import Gathering
from producers.rewards.scorer import combined
from producers.rewards.service import FIRST_PAUSE_S, LONGEST_PAUSE_S, pause_s
from producers.rewards.worker import Score, added, group_judged

PARTS = (RewardConfig(name="a.py:f", weight=2.0), RewardConfig(name="b.py:g", weight=-0.5))


def test_a_sum_is_weighted_and_knows_its_parts() -> None:
    scores: dict[int | None, Score] = {0: Score(1.0, correct=True), 1: Score(3.0)}
    assert combined(PARTS, scores) == Score(0.5, correct=True, parts={"a.py:f": 1.0, "b.py:g": 3.0})
    assert combined(PARTS[:1], {0: Score(1.5, correct=False)}) == Score(3.0, correct=False)
    verdict_alone: dict[int | None, Score] = {None: Score(0.0, correct=True)}
    assert combined(PARTS, verdict_alone) == Score(0.0, correct=True)


def test_what_fails_in_a_part_fails_the_sum_with_its_name() -> None:
    def failure(text: str, parts: tuple[RewardConfig, ...] = PARTS) -> str:
        return combined(
            parts, {0: Score(1.0), 1: Score(failure=text)} if len(parts) > 1 else {0: Score(failure=text)}
        ).failure

    assert failure("reward took longer than 1 s") == "reward 'b.py:g' took longer than 1 s"
    assert failure("reward 'b.py:g': file is not there") == "reward 'b.py:g': file is not there"
    assert failure("environment 'x' does not load") == "environment 'x' does not load"
    assert failure("reward took longer than 1 s", PARTS[:1]) == "reward took longer than 1 s"
    assert combined(PARTS, {0: Score(1e308), 1: Score(0.0)}).failure == "reward is inf, not a finite number"


def test_what_is_relative_is_added() -> None:
    own, more = Score(1.0, correct=True, parts={"a": 1.0}), Score(-0.25, parts={"b": -0.5})
    assert added(own, more) == Score(0.75, correct=True, parts={"a": 1.0, "b": -0.5})
    assert added(own, Score(failure="no")) == Score(failure="no", correct=True)


@pytest.mark.parametrize(
    ("values", "failure"),
    [
        (3, "reward returned int, not a list of 2 numbers"),
        ("12", "reward returned str, not a list of 2 numbers"),
        ([1.0], "reward returned 1 numbers for a group of 2"),
        ([1.0, None], "reward returned NoneType, not a number"),
        ([1.0, float("inf")], "reward is inf, not a finite number"),
    ],
)
def test_a_group_is_scored_as_a_whole_or_not_at_all(values: Any, failure: str) -> None:
    assert group_judged(values, 2) == [Score(failure=failure)] * 2
    assert group_judged((1, 2.5), 2) == [Score(1.0), Score(2.5)]


async def test_a_group_is_scored_in_the_order_of_its_members() -> None:
    """Whoever ends first, so that one that is played again gets the same rewards."""

    async def ask(rollouts: Sequence[Rollout]) -> list[Score]:
        assert [rollout.index for rollout in rollouts] == [0, 2, 3]
        return [Score(float(place)) for place in range(len(rollouts))]

    gathering = Gathering(4, ask)
    joined = {member: asyncio.create_task(gathering.join(member, replace(ROLLOUT, index=member))) for member in (3, 0)}
    await asyncio.sleep(0)
    gathering.out(1)
    joined[2] = asyncio.create_task(gathering.join(2, replace(ROLLOUT, index=2)))
    assert {member: (await score).reward for member, score in joined.items()} == {0: 0.0, 2: 1.0, 3: 2.0}


def rewards(given: object) -> tuple[RewardConfig, ...]:
    return EnvironmentConfig.model_validate({"name": "arithmetic", "reward": given}).reward


def test_a_reward_is_a_name_a_table_or_a_list_of_these() -> None:
    assert rewards("") == ()
    assert rewards("a.py:f") == (RewardConfig(name="a.py:f"),)
    assert rewards({"name": "a.py:f", "group": True}) == (RewardConfig(name="a.py:f", group=True),)
    assert rewards(["environment", {"name": "a.py:f", "weight": 2}]) == (
        RewardConfig(name="environment"),
        RewardConfig(name="a.py:f", weight=2.0),
    )
    stored = EnvironmentConfig(name="arithmetic", reward=rewards("a.py:f")).model_dump(mode="json")
    assert EnvironmentConfig.model_validate(stored).reward == rewards("a.py:f")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["a.py:f", "a.py:f"], "'a.py:f' stands twice"),
        ({"name": "http://host/x", "group": True}, "group = true is for functions"),
        ({"name": "environment", "group": True}, "group = true is for functions"),
        ("http://me:secret@host/x", "token_env"),
        ("http:///x", "names no host"),
        ("http://host:port/x", "names no host"),
        ({"name": "http://host/x", "format": "sglang", "template": "<{prompt}>"}, "no place for {completion}"),
        ({"name": ""}, "at least 1 character"),
        (3, "valid tuple"),
    ],
)
def test_what_cannot_be_a_reward_is_refused(given: object, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        rewards(given)


ROLLOUT = Rollout("own", 2, "{completion}", "{prompt} é", (), None, "stop")


def test_texts_are_put_into_a_template_once() -> None:
    sglang = RewardConfig(name="http://h/x", format="sglang", template="<{prompt}|{completion}>{other}")
    assert encoded(sglang, ROLLOUT) == '"<{completion}|{prompt} \\u00e9>{other}"'
    assert request(sglang, ['"a"', '"b"']) == b'{"text": ["a", "b"]}'


def test_answers_of_a_reward_model_have_one_number_each() -> None:
    sglang = RewardConfig(name="http://h/x", format="sglang")
    assert values_of(sglang, b'[{"embedding": [1.5]}, {"embedding": [-2]}]', 2) == [1.5, -2]
    for bad in (b'[{"embedding": [1, 2]}]', b'[{"embedding": []}]', b'{"embedding": [1]}', b"[1]"):
        with pytest.raises(BadAnswer, match="not of format 'sglang'"):
            values_of(sglang, bad, 1)


def test_pauses_grow_and_differ() -> None:
    for attempt, longest in ((0, FIRST_PAUSE_S), (3, 8 * FIRST_PAUSE_S), (1000, LONGEST_PAUSE_S)):
        pauses = [pause_s(attempt) for _ in range(50)]
        assert longest / 2 <= min(pauses) < max(pauses) <= longest
