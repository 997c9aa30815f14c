from __future__ import annotations

import asyncio

import pytest

from headrace.config import EnvironmentConfig
from headrace.errors import EnvironmentLoadError
from producers.chat import ByteChat
from producers.environments.arithmetic import Arithmetic
from producers.environments.registry import build_environment
from producers.environments.tool_arithmetic import ToolArithmetic, calculator
from producers.rollout import Played, play
from tests.replies import Say, player_of
from tests.rollouts import TASK
from tests.templates import LLAMA, MISTRAL, PLAIN, QWEN, byte_chat


def call(expression: str, form: str = "hermes") -> str:
    arguments = f'{{"expression": "{expression}"}}'
    return {
        "hermes": f'<tool_call>\n{{"name": "calculator", "arguments": {arguments}}}\n</tool_call>',
        "llama": f'{{"name": "calculator", "parameters": {arguments}}}',
        "mistral": f'[TOOL_CALLS] [{{"name": "calculator", "arguments": {arguments}, "id": "abcdefghi"}}]',
    }[form]


async def played(say: Say, environment: ToolArithmetic, template: str | None = None, **limits: int) -> Played:
    player, _ = player_of(say, byte_chat(template) if template else None, **limits)
    return await play(player, environment, TASK, 0)


def asked(shown: str) -> str:
    return shown.rpartition("What is ")[2].partition("?")[0]


@pytest.mark.parametrize(
    ("template", "form", "mark"),
    [
        (QWEN, "hermes", "<tool_response>\n"),
        (LLAMA, "llama", '<|start_header_id|>ipython<|end_header_id|>\n\n"'),
        (MISTRAL, "mistral", '[TOOL_RESULTS] {"content": "'),
        (PLAIN, "hermes", "<tool_response>\n"),
        (None, "hermes", "<tool_response>\n"),
    ],
)
async def test_the_calculator_is_called_through_every_template(template: str | None, form: str, mark: str) -> None:
    def say(shown: str) -> str:
        _, found, after = shown.rpartition(mark)
        return (
            after[: after.index(next(letter for letter in after if letter in '"\n'))]
            if found
            else call(asked(shown), form)
        )

    environment = ToolArithmetic()
    game = await played(say, environment, template)
    assert [len(turn.tool_calls) for turn in game.rollout.turns] == [1, 0]
    assert game.rollout.completion == str(game.rollout.answer)
    assert environment.correct(game.rollout)
    assert game.turn_reward == 0.4
    assert await environment.score(game.rollout) == 0.6
    assert game.transcript.sampled == sum(map(len, game.transcript._tokens[1::2]))


@pytest.mark.parametrize(
    ("answers", "rewards", "correct"),
    [
        (["ANSWER"], [0], True),
        (["nothing"], [0], False),
        ([call("1 +"), call("1 + 1"), call("2 + 2"), "ANSWER"], [0, 0.4, 0, 0], True),
        ([call("1 + 1") + "<tool_call>{}", "7"], [0, 0], False),
        (["<tool_call>"] * 3, [0, 0, 0], False),
        ([call("1 + 1")] * 2 + [call("1") + " ANSWER"], [0.4, 0, 0], False),
    ],
)
async def test_a_proper_call_is_rewarded_once(answers: list[str], rewards: list[float], correct: bool) -> None:
    environment = ToolArithmetic()
    answer = str(environment.episode("train", TASK.index, 0).answer)
    texts = iter(text.replace("ANSWER", answer) for text in answers)
    game = await played(lambda shown: next(texts), environment, max_turns=len(answers))
    assert [turn.reward for turn in game.rollout.turns] == rewards
    assert environment.correct(game.rollout) is correct
    assert await environment.score(game.rollout) == (0.6 if correct else 0.0)


def test_questions_are_those_of_arithmetic() -> None:
    environment, plain = ToolArithmetic(digits=1, operators=["+"]), Arithmetic()
    assert (len(environment), environment.eval_size()) == (len(plain), plain.eval_size())
    assert environment.episode("eval", 3, 0).answer == plain.episode("eval", 3, 0).answer
    first = asyncio.run(environment.episode("train", 0, 0).reset())
    assert first.tools[0]["function"]["parameters"]["properties"]["expression"]["type"] == "string"


@pytest.mark.parametrize("template", [QWEN, LLAMA, MISTRAL, PLAIN, None])
async def test_shots_show_how_it_is_done(template: str | None) -> None:
    environment = ToolArithmetic(shots=2)
    game = await played(lambda shown: "7", environment, template)
    chat = byte_chat(template) if template else ByteChat()
    shown = game.transcript.token_ids()
    text = chat.text(shown) if isinstance(chat, ByteChat) else chat.written(shown)
    for index in (len(environment) // 4, len(environment) * 3 // 4):
        question = environment.episode("train", index, 0)
        assert text.count(f'"expression": "{asked((await question.reset()).messages[-1].content)}"') == 1
        assert text.count(str(question.answer)) >= 2
    assert game.transcript.sampled == len("7") + 1


@pytest.mark.parametrize(
    ("expression", "value"), [("12 * (3 + 4)", 84), (" 7 - -2", 9), ("6 / 4", 1.5), ("+1.5", 1.5), ("2 * 3 - 1", 5)]
)
def test_it_calculates(expression: str, value: float) -> None:
    assert calculator(expression) == value


@pytest.mark.parametrize(
    "expression",
    ["", "1 +", "2 ** 9", "2 // 1", "x", "__import__('os')", "1" * 500, "1 2", "(1, 2)", "(" * 150, "1.2.3"],
)
def test_what_is_no_sum_raises(expression: str) -> None:
    with pytest.raises((ValueError, SyntaxError, MemoryError)):
        calculator(expression)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"called": 2}, "tool_arithmetic: called = 2 is not between 0 and 1"),
        ({"digits": 0}, "digits = 0 is not between"),
        ({"shots": 9}, "shots = 9 is not"),
    ],
)
def test_bad_options_are_one_sentence(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(EnvironmentLoadError, match=sentence):
        build_environment(EnvironmentConfig(name="tool_arithmetic", options=options))
