from __future__ import annotations

import asyncio

import pytest

from headrace.config import EnvironmentConfig
from headrace.errors import EnvironmentLoadError
from producers.environments.api import Done, Environment, Observation, Rollout, Turn
from producers.environments.guess_number import GuessNumber, Secret, guessed
from producers.environments.registry import build_environment, sizes_of
from producers.rollout import Played, play
from tests.replies import Say, player_of
from tests.rollouts import TASK


async def played(environment: Environment, say: Say, index: int = 0) -> Played:
    from dataclasses import replace

    player, _ = player_of(say)
    return await play(player, environment, replace(TASK, index=index), 0)


def halving(shown: str) -> str:
    """The best player there is, from the conversation alone."""
    lines = shown.replace("\0", "").splitlines()
    low, high = (int(word.strip(",.")) for word in lines[0].split() if word.strip(",.").isdigit())
    guess = (low + high) // 2
    for line in lines[1:]:
        if line.endswith("Higher."):
            low = guess + 1
        elif line.endswith("Lower."):
            high = guess - 1
        guess = (low + high) // 2
    return str(guess)


async def test_halving_finds_every_number() -> None:
    environment = GuessNumber(size=10, turns=4)
    for index in range(len(environment)):
        game = await played(environment, halving, index)
        assert environment.correct(game.rollout)
        turns = len(game.rollout.turns)
        assert await environment.score(game.rollout) == 1 - (turns - 1) / 4
        assert game.turn_reward == pytest.approx(0.02 * (turns - 1))
        assert game.finish_reason == "stop"


async def test_a_number_that_is_not_found_gives_nothing_but_its_valid_guesses() -> None:
    environment = GuessNumber(size=10, turns=10, valid=0.05)
    answers = iter(["1", "11", "I do not know", "1 or 2"] + ["1"] * 6)
    game = await played(environment, lambda shown: next(answers), 5)
    assert game.rollout.answer == Secret(6, 1, 10, 10)
    assert (environment.correct(game.rollout), await environment.score(game.rollout)) == (False, 0.0)
    assert [turn.reward for turn in game.rollout.turns] == [0.05, 0, 0, 0, 0.05, 0.05, 0.05, 0.05, 0.05, 0]


async def test_feedback_says_where_to_look() -> None:
    episode = GuessNumber(turns=9, prompt="{low}-{high}", system="Guess.").episode("train", 3, 0)
    first = await episode.reset()
    assert [message.content for message in first.messages] == ["Guess.", "1-10"]
    said = {}
    for text in ("2", " 9.", "0", "many", "3, 4", "-4", "4"):
        answer = await episode.step(Turn(text, "stop"))
        said[text] = answer.messages[0].content if isinstance(answer, Observation) else answer
    again = "Only a number from 1 to 10."
    assert said == {"2": "Higher.", " 9.": "Lower.", "0": again, "many": again, "3, 4": again, "-4": again, "4": Done()}


def test_held_out_ranges_share_no_prompt_with_training() -> None:
    environment = GuessNumber(size=6, ranges=9, held_out=3, lowest=-2, step=4)
    assert sizes_of("guess_number", environment) == (36, 18)

    def games(split: str, size: int) -> list[tuple[str, Secret]]:
        episodes = [environment.episode(split, index, 0) for index in range(size)]
        return [(asyncio.run(each.reset()).messages[0].content, each.answer) for each in episodes]

    train, held_out = games("train", 36), games("eval", 18)
    assert not {prompt for prompt, _ in train} & {prompt for prompt, _ in held_out}
    assert len({secret for _, secret in train + held_out}) == 54
    assert all(secret.low <= secret.number <= secret.high for _, secret in train + held_out)
    assert games("eval", 18) == held_out
    assert {secret.low for _, secret in train + held_out} == {-2 + 4 * place for place in range(9)}


@pytest.mark.parametrize(
    ("text", "number"),
    [("7", 7), ("It is 7.", 7), ("-7", -7), ("7 or 8", None), ("", None), ("9" * 30, None), ("seven", None)],
)
def test_a_guess_is_the_only_number(text: str, number: int | None) -> None:
    assert guessed(text) == number


def test_the_turn_in_which_it_was_found_counts() -> None:
    environment = GuessNumber(turns=5)
    turns = tuple(Turn(text, "stop") for text in ("1", "2", "3"))
    rollout = Rollout("guess_number", 0, "", "3", turns, Secret(3, 1, 10, 5), "stop")
    assert asyncio.run(environment.score(rollout)) == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"size": 0}, "guess_number: size = 0 is not at least 1"),
        ({"turns": 0}, "turns = 0 is not at least 1"),
        ({"ranges": 10**6}, "ranges = 1000000 is more than 100000"),
        ({"ranges": 3, "held_out": 3}, "held_out = 3 is not between 0 and ranges - 1 = 2"),
        ({"valid": 0.1}, r"valid = 0.1 is not between 0 and 1 / turns = 0.1"),
        ({"prompt": "Guess!"}, "has no place for {low} and {high}"),
    ],
)
def test_bad_options_are_one_sentence(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(EnvironmentLoadError, match=sentence):
        build_environment(EnvironmentConfig(name="guess_number", options=options))
