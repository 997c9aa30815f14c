from __future__ import annotations

import asyncio
import importlib.util
import subprocess
import sys
import threading
from contextlib import AsyncExitStack

import pytest

from headrace.config import EnvironmentConfig
from headrace.errors import EnvironmentLoadError
from producers.environments.api import Environment, Rollout
from producers.environments.lifetime import set_up
from producers.environments.reasoning_gym_adapter import Questions
from producers.environments.registry import build_environment

installed = pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None, reason="`make reasoning-gym` installs what this needs"
)


def gym(**options: object) -> Environment:
    return build_environment(EnvironmentConfig(name="reasoning_gym", options=options))


def rollout(completion: str, answer: object) -> Rollout:
    return Rollout("reasoning_gym", 0, "", completion, (), answer, "stop")


@installed
def test_questions_are_scored_by_their_dataset() -> None:
    environment = gym(dataset="chain_sum", size=20, eval_size=5, min_digits=1, max_digits=1)
    episode = environment.episode("train", 3, 0)
    right = episode.answer["answer"]
    assert episode.answer["question"] == asyncio.run(episode.reset()).messages[0].content
    assert asyncio.run(environment.score(rollout(right, episode.answer))) == 1.0
    assert environment.correct(rollout(f" {right}\n", episode.answer))
    assert not environment.correct(rollout("1000000", episode.answer))
    assert asyncio.run(environment.score(rollout("1000000", episode.answer))) < 1.0


@installed
def test_the_answer_may_stand_in_a_tag() -> None:
    environment = gym(dataset="chain_sum", size=5, answer_tag="answer", prompt="{question} Use <answer> tags.")
    answer = environment.episode("train", 0, 0).answer
    assert environment.correct(rollout(f"hm <answer>0.5</answer> <answer> {answer['answer']} </answer>", answer))
    assert not environment.correct(rollout(str(answer["answer"]), answer))


@installed
def test_no_eval_question_stands_in_training() -> None:
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    environment = gym(dataset="chain_sum", size=60, eval_size=60, **options)
    train = {environment.episode("train", index, 0).answer["question"] for index in range(len(environment))}
    held_out = [environment.episode("eval", index, 0).answer["question"] for index in range(environment.eval_size())]
    assert 0 < len(held_out) < 60
    assert len(set(held_out)) == len(held_out)
    assert not train & set(held_out)


@installed
async def test_questions_are_made_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of an evaluation, which are made once the environment is set up."""
    makers: list[str] = []
    made = Questions._made

    def note(questions: Questions, index: int) -> dict[str, object]:
        makers.append(threading.current_thread().name)
        return made(questions, index)

    monkeypatch.setattr(Questions, "_made", note)
    environment = gym(dataset="chain_sum", size=20, eval_size=5)
    async with AsyncExitStack() as stack:
        await set_up({"gym": environment}, stack)
        assert environment.eval_size() == 5
        for split in ("train", "eval"):
            episodes = [environment.episode(split, 3, 0) for _ in range(4)]
            shown = await asyncio.gather(*(episode.reset() for episode in episodes))
            assert len({observation.messages[0].content for observation in shown}) == 1
            assert episodes[0].answer["question"] == shown[0].messages[0].content
    assert len(makers) == 25, "each question once"
    assert threading.current_thread().name not in makers


@installed
async def test_one_that_is_ended_while_it_is_set_up_does_not_go_on() -> None:
    environment = gym(dataset="knight_swap", size=100_000, eval_size=5)
    async with AsyncExitStack() as stack:
        setting_up = asyncio.create_task(set_up({"gym": environment}, stack))
        await asyncio.sleep(0)
        setting_up.cancel()
        await asyncio.wait({setting_up})
    with pytest.raises(EnvironmentLoadError, match="ended while its held-out questions were made"):
        environment.eval_size()


@installed
def test_an_eval_split_without_a_question_of_its_own_is_refused() -> None:
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    with pytest.raises(EnvironmentLoadError, match="stands in training too"):
        gym(dataset="chain_sum", size=5000, eval_size=3, **options).eval_size()


@installed
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"dataset": "nonsense"}, "dataset = 'nonsense' is not one of its .* datasets: ab, acre, "),
        ({"dataset": "chainsum"}, "is not one of its .* datasets .did you mean 'chain_sum'"),
        ({"dataset": "chain_sum", "colour": 1}, "refuses its options: 'colour' is no option of it, it takes min_te"),
        ({"dataset": "chain_sum", "min_term": 2}, "'min_term' is no option of it .did you mean 'min_terms'"),
        ({"dataset": "chain_sum", "min_terms": "two"}, "refuses its options: min_terms = 'two': input should be"),
        ({"dataset": "chain_sum", "min_terms": 9, "max_terms": 2}, "refuses its options"),
        ({"dataset": "chain_sum", "prompt": "?"}, "has no place for {question}"),
        ({"dataset": "chain_sum", "size": 0}, "must be positive"),
        ({}, "cannot be made with options {}: it needs dataset"),
    ],
)
def test_bad_options_are_one_sentence(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(EnvironmentLoadError, match=sentence):
        gym(**options)


def blocked(*modules: str) -> str:
    """A program that makes a dataset where these modules are not installed."""
    return (
        f"import sys; sys.modules.update({{name: None for name in {modules!r}}})\n"
        "from producers.environments.reasoning_gym_adapter import ReasoningGym\n"
        "from headrace.errors import EnvironmentLoadError\n"
        "try:\n    print(len(ReasoningGym(dataset=sys.argv[1], size=7)))\n"
        "except EnvironmentLoadError as error:\n    print(error)\n"
    )


def run(program: str, dataset: str) -> str:
    done = subprocess.run([sys.executable, "-c", program, dataset], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_a_missing_package_is_one_sentence() -> None:
    assert "pip install 'headrace[reasoning-gym]'" in run(blocked("reasoning_gym"), "chain_sum")


@installed
def test_it_works_without_the_compiled_requirement() -> None:
    assert run(blocked("pycosat"), "chain_sum") == "7"
    assert "needs pycosat" in run(blocked("pycosat"), "zebra_puzzles")
