from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config import Config, EnvironmentConfig
from headrace.errors import EnvironmentLoadError
from producers.environments.api import Done, Rollout, Turn
from producers.environments.arithmetic import Arithmetic, Space, held_out_ranks, last_number, text_of, value_of
from producers.environments.registry import build_environment, environments_of, sizes_of
from producers.rewards.registry import load_reward


def rollout(completion: str, answer: object, finish: str = "stop") -> Rollout:
    return Rollout("arithmetic", 0, "", completion, (Turn(completion, finish),), answer, finish)


def prompts(environment: Arithmetic, split: str) -> list[str]:
    size = len(environment) if split == "train" else environment.eval_size()
    shown = [asyncio.run(environment.episode(split, index, 0).reset()) for index in range(size)]
    return [observation.messages[0].content for observation in shown]


def test_one_digit_sums_are_split_without_a_shared_sum() -> None:
    environment = Arithmetic()
    train, held_out = prompts(environment, "train"), prompts(environment, "eval")
    assert (len(train), len(held_out)) == (76, 24)
    everything = {f"What is {a} + {b}? Reply with only the number." for a in range(10) for b in range(10)}
    assert set(train) | set(held_out) == everything
    assert len(set(train) | set(held_out)) == len(train) + len(held_out)
    for prompt in held_out:
        a, b = prompt.removeprefix("What is ").split("?")[0].split(" + ")
        assert f"What is {b} + {a}? Reply with only the number." in held_out


def test_the_held_out_sums_are_the_same_in_every_process() -> None:
    assert held_out_ranks(Space(1, 2, ("+",)), 24) == held_out_ranks(Space(1, 2, ("+",)), 24)
    assert prompts(Arithmetic(), "eval") == prompts(Arithmetic(), "eval")


@pytest.mark.parametrize(
    ("completion", "reward", "correct"),
    [
        ("11", 1.0, True),
        (" 11\n", 1.0, True),
        ("4 + 7 = 11", 0.8, True),
        ("The answer is 11.", 0.8, True),
        ("11, or is it 12?", 0.0, False),
        ("eleven", 0.0, False),
        ("", 0.0, False),
        ("-11", 0.0, False),
        ("4-11", 0.8, True),
        ("111", 0.0, False),
        ("1.11", 0.0, False),
        ("11.0", 0.8, True),
    ],
)
def test_the_reward_of_a_completion(completion: str, reward: float, correct: bool) -> None:
    environment = Arithmetic()
    assert asyncio.run(environment.score(rollout(completion, 11))) == reward
    assert environment.correct(rollout(completion, 11)) is correct


def test_reward_values_and_prompt_are_options() -> None:
    environment = Arithmetic(
        exact=2.0, ended=0.5, cut=0.1, prompt="{expression} =", digits=2, terms=3, operators=["*", "-"]
    )
    assert asyncio.run(environment.score(rollout("11", 11))) == 2.0
    assert asyncio.run(environment.score(rollout("so 11", 11))) == 0.5
    assert asyncio.run(environment.score(rollout("so 11", 11, "length"))) == 0.1
    episode = environment.episode("train", 12345, 0)
    expression = asyncio.run(episode.reset()).messages[0].content.removesuffix(" =")
    assert eval(expression) == episode.answer
    assert asyncio.run(episode.step(Turn("1", "stop"))) == Done()


def test_large_spaces_are_counted_without_a_list() -> None:
    environment = Arithmetic(digits=5, terms=3, held_out=50)
    assert len(environment) + environment.eval_size() == 10**15
    assert environment.episode("train", 10**14, 0).answer > 0


def test_last_number_reads_thousands() -> None:
    assert last_number("about 1,234,567") == 1234567
    assert last_number("1, 2") == 2
    assert last_number("none") is None


shapes = st.tuples(
    st.integers(1, 2), st.integers(2, 3), st.lists(st.sampled_from("+-*"), min_size=1, max_size=3, unique=True)
)


@given(shapes, st.data())
def test_ranks_and_expressions_are_inverse(shape: tuple[int, int, list[str]], data: st.DataObject) -> None:
    space = Space(shape[0], shape[1], tuple(shape[2]))
    rank = data.draw(st.integers(0, len(space) - 1))
    numbers, operators = space.expression(rank)
    assert space.rank(numbers, operators) == rank
    assert eval(text_of(numbers, operators)) == value_of(numbers, operators)
    for other in space.family(rank):
        assert value_of(*space.expression(other)) == value_of(numbers, operators)
        assert space.family(other) == space.family(rank)


@settings(max_examples=25)
@given(shapes, st.integers(0, 40))
def test_training_indices_skip_exactly_the_held_out(shape: tuple[int, int, list[str]], held_out: int) -> None:
    digits, terms, operators = shape
    environment = Arithmetic(digits=digits, terms=terms, operators=operators, held_out=held_out, prompt="{expression}")
    assert environment.eval_size() >= held_out
    held = set(prompts(environment, "eval"))
    assert len(held) == environment.eval_size()
    step = max(1, len(environment) // 500)
    shown = [
        asyncio.run(environment.episode("train", index, 0).reset()).messages[0].content
        for index in [*range(0, len(environment), step), len(environment) - 1]
    ]
    assert not held & set(shown)
    assert len(set(shown)) >= len(shown) - 1


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"digits": 0}, "digits = 0 is not between 1 and 9"),
        ({"terms": 1}, "terms = 1 is not between 2 and 6"),
        ({"operators": ["/"]}, r"operators = \['/'\] is not a choice of"),
        ({"prompt": "What?"}, "has no place for {expression}"),
        ({"held_out": 51}, "held_out = 51 is not between 0 and half of the 100 expressions"),
        ({"digits": 9, "terms": 6}, "more than 2\\*\\*53 expressions"),
        ({"digit": 1}, "made with options {'digit': 1}: 'digit' is no option of it .did you mean 'digits'"),
        ({"colour": 1}, "'colour' is no option of it, it takes digits, terms, operators, prompt, .*held_out$"),
        ({"digits": "two"}, "digits = 'two': input should be a valid integer"),
    ],
)
def test_bad_options_are_one_sentence(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(EnvironmentLoadError, match=sentence):
        build_environment(EnvironmentConfig(name="arithmetic", options=options))


OWN = """
import helper_beside
from producers.environments.single_turn import SingleTurn

class Own:
    def __init__(self, size=3): self.size = size
    def __len__(self): return self.size
    def eval_size(self): return 0
    def episode(self, split, index, seed): return SingleTurn("?", index)
    async def score(self, rollout): return 1.0
    def correct(self, rollout): return True

class Half:
    def __len__(self): return 1

def reward(rollout): return helper_beside.VALUE
broken = 3
def refuses(**options): raise RuntimeError("no\\nway")
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "helper_beside.py").write_text("VALUE = 0.25\n")
    file = tmp_path / "own.py"
    file.write_text(OWN)
    return file


def test_ones_own_file_gives_environment_and_reward(own: Path) -> None:
    assert len(build_environment(EnvironmentConfig(name=f"{own}:Own", options={"size": 5}))) == 5
    assert load_reward(f"{own}:reward")(rollout("", 0)) == 0.25


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("nonsense", r"'nonsense' is not known; use a built-in name \(arithmetic, dataset, .*verifiers\)"),
        ("own/file.py", "environment 'own/file.py' is a file; name an object of it, as in `own/file.py:Mine`"),
        ("arithmetics", "'arithmetics' is not known .did you mean 'arithmetic'"),
        ("dataset", "cannot be made with options {}: it needs data, as in options = { data = … } or `-o data=…`"),
        ("no_such_package_anywhere:Thing", r"does not import \(ModuleNotFoundError: No module named"),
        ("no/such/file.py:Thing", "no/such/file.py does not exist"),
        ("OWN:Missing", "has no object 'Missing', only Own, Half"),
        ("OWN:Half", "is not an environment: it has no eval_size, episode, score, correct"),
        ("OWN:broken", "is int, not a function"),
        ("OWN:refuses", r"cannot be made with options {} \(RuntimeError: no way\)"),
        ("json:loads", "cannot be made with options {}: it needs s"),
    ],
)
def test_an_environment_that_does_not_load_is_one_sentence(name: str, sentence: str, own: Path) -> None:
    with pytest.raises(EnvironmentLoadError, match=sentence) as caught:
        build_environment(EnvironmentConfig(name=name.replace("OWN", str(own))))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("method", "answer", "sentence"),
    [
        ("__len__", "-4", "its __len__ returned -4; it must be a number from 0 to"),
        ("__len__", "'ten'", "its __len__ returned 'ten'"),
        ("__len__", "1 // 0", r"its __len__ failed \(ZeroDivisionError"),
        ("eval_size", "None", "its eval_size returned None"),
        ("eval_size", "True", "its eval_size returned True"),
        ("eval_size", "10 ** 400", "its eval_size returned 10000.*0…; it must be"),
        ("eval_size", "open('/nowhere')", r"its eval_size failed \(FileNotFoundError"),
    ],
)
def test_a_size_that_is_none_is_one_sentence(method: str, answer: str, sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "sized.py"
    others = {"__len__": "3", "eval_size": "2", "episode": "0", "score": "0", "correct": "0", method: answer}
    body = "".join(f"    def {name}(self, *given): return {text}\n" for name, text in others.items())
    file.write_text(f"class Sized:\n{body}")
    name = f"{file}:Sized"
    with pytest.raises(EnvironmentLoadError, match=sentence):
        sizes_of(name, build_environment(EnvironmentConfig(name=name)))


def test_a_file_that_raises_at_import_is_named(tmp_path: Path) -> None:
    file = tmp_path / "bad.py"
    file.write_text("def broken(:\n")
    with pytest.raises(EnvironmentLoadError, match=r"bad.py does not import \(SyntaxError"):
        load_reward(f"{file}:reward")
    file.write_text("reward = 1.0\n")
    with pytest.raises(EnvironmentLoadError, match="is float, not a function"):
        load_reward(f"{file}:reward")


def test_environments_of_a_run_go_by_their_labels() -> None:
    environments = (
        EnvironmentConfig(name="arithmetic"),
        EnvironmentConfig(name="arithmetic", label="hard", options={"digits": 2}),
        EnvironmentConfig(name="other:Thing", weight=0),
    )
    found = environments_of(Config(environments=environments))
    assert found == dict(zip(("arithmetic", "hard", "other:Thing"), environments, strict=True))
