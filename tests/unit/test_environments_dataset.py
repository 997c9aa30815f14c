"""The environment "dataset": what rows become, which of them are asked, and how bad ones are refused."""

from __future__ import annotations

import asyncio
import json
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config import EnvironmentConfig
from headrace.errors import EnvironmentLoadError
from producers.environments.api import Environment, Message, Rollout
from producers.environments.calls import RolloutFailed
from producers.environments.judging import Judging
from producers.environments.pass_rates import Band, Measured, kept, read_pass_rates, write_pass_rates
from producers.environments.registry import build_environment, sizes_of

ROWS = [{"question": f"What is {n} + {n}?", "answer": f"It is easy. #### {2 * n}", "rate": n / 10} for n in range(10)]


def dataset(**options: Any) -> Environment:
    return build_environment(EnvironmentConfig(name="dataset", options=options))


def lines(folder: Path, rows: Sequence[object], name: str = "rows.jsonl") -> str:
    file = folder / name
    file.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return str(file)


def shown(environment: Environment, split: str = "train") -> list[str]:
    size = len(environment) if split == "train" else environment.eval_size()
    prompts = [asyncio.run(environment.episode(split, index, 0).reset()).messages for index in range(size)]
    return [messages[-1].content for messages in prompts]


def rollout(completion: str, answer: object) -> Rollout:
    return Rollout("dataset", 0, "", completion, (), answer, "stop")


def test_columns_fill_the_prompt_and_say_the_answer(tmp_path: Path) -> None:
    rows = [{"q": "2+2?", "deep": {"gold": 4}, "hint": 1.5}]
    environment = dataset(
        data=lines(tmp_path, rows),
        prompt="{q} ({hint}) Use {{braces}} and \\boxed{}.",
        system="Be brief.",
        answer="deep.gold",
    )
    episode = environment.episode("train", 0, 7)
    messages = asyncio.run(episode.reset()).messages
    assert messages == (Message("system", "Be brief."), Message("user", "2+2? (1.5) Use {braces} and \\boxed{}."))
    assert episode.answer == 4
    assert asyncio.run(environment.score(rollout(" 4\n", 4))) == 1.0
    assert asyncio.run(environment.score(rollout("four", 4))) == 0.0


def test_a_columns_name_may_have_spaces_dashes_and_letters_of_any_script(tmp_path: Path) -> None:
    rows = [{"the question": "2+2?", "hint-1": "even", "прим": "x", "a b": {"c d": 7}, "answer": 4}]
    prompt = "{the question} ({hint-1}, {прим}, {a b.c d}) \\boxed{} \\frac{1}{2} {{no column}}"
    environment = dataset(data=lines(tmp_path, rows), prompt=prompt)
    (message,) = asyncio.run(environment.episode("train", 0, 7).reset()).messages
    assert message.content == "2+2? (even, x, 7) \\boxed{} \\frac{1}{2} {no column}"
    with pytest.raises(EnvironmentLoadError, match="there is no column 'no such column'"):
        dataset(data=lines(tmp_path, rows), prompt="{the question} {no such column}").episode("train", 0, 7)


def test_a_column_of_messages_is_shown_as_it_is(tmp_path: Path) -> None:
    chat = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "?"},
    ]
    environment = dataset(data=lines(tmp_path, [{"chat": chat}]), messages="chat", answer="")
    episode = environment.episode("train", 0, 0)
    told = asyncio.run(episode.reset()).messages
    assert [(message.role, message.content) for message in told] == [
        ("user", "hi"),
        ("assistant", "yes"),
        ("user", "?"),
    ]
    assert episode.answer is None
    assert not environment.correct(rollout("None", None))


def test_the_answer_may_follow_a_mark(tmp_path: Path) -> None:
    environment = dataset(data=lines(tmp_path, ROWS), prompt="{question}", answer_after="####", match="last_number")
    answer = environment.episode("train", 3, 0).answer
    assert answer == "6"
    assert environment.correct(rollout("3 and 3 make 6.", answer))
    assert not environment.correct(rollout("6 is what 3 and 3 do not make, but 7", answer))


@pytest.mark.parametrize(
    ("match", "tag", "said", "answer", "right"),
    [
        ("exact", "", " Paris ", "Paris", True),
        ("exact", "", "Paris.", "Paris", False),
        ("exact", "a", "I think <a>Rome</a>, no, <a> Paris </a>", "Paris", True),
        ("exact", "a", "Paris", "Paris", False),
        ("last_number", "", "1,234 apples", 1234, True),
        ("last_number", "", "0.30000000000000004", 0.3, True),
        ("last_number", "", "none", 0, False),
        ("math_verify", "", "So it is $\\frac{1}{2}$", "0.5", True),
        ("math_verify", "", "So it is $\\frac{1}{3}$", "0.5", False),
    ],
)
def test_ways_to_judge(match: str, tag: str, said: str, answer: object, right: bool) -> None:
    assert Judging(match, tag).right(rollout(said, answer)) is right


def test_a_right_answer_that_is_no_number_fails_the_rollout_instead_of_calling_it_wrong() -> None:
    with pytest.raises(ValueError, match="'eleven' has no number"):
        Judging("last_number").right(rollout("11", "eleven"))


@pytest.mark.parametrize("held_out", [3, 0.3])
def test_held_out_rows_are_the_same_everywhere_and_none_is_trained_on(held_out: float, tmp_path: Path) -> None:
    options = {"data": lines(tmp_path, ROWS), "prompt": "{question}", "held_out": held_out}
    environment = dataset(**options)
    assert sizes_of("dataset", environment) == (7, 3)
    assert set(shown(environment)) | set(shown(environment, "eval")) == {row["question"] for row in ROWS}
    assert shown(environment, "eval") == shown(dataset(**options), "eval")


def test_another_file_may_be_held_out(tmp_path: Path) -> None:
    other = lines(tmp_path, ROWS[:2], "eval.jsonl")
    environment = dataset(data=lines(tmp_path, ROWS[2:]), prompt="{question}", eval_data=other)
    assert sizes_of("dataset", environment) == (8, 2)
    assert shown(environment, "eval") == [row["question"] for row in ROWS[:2]]
    rated = lines(tmp_path, [{**row, "rate": 0.5} for row in ROWS[2:]], "rated.jsonl")
    measured = dataset(data=rated, prompt="{question}", eval_data=other, pass_rate_column="rate", pass_rate=[0.1, 0.9])
    assert sizes_of("dataset", measured) == (8, 2), "what is held out need not be measured"


def test_several_files_are_one(tmp_path: Path) -> None:
    for place, part in enumerate((ROWS[:4], ROWS[4:5], ROWS[5:])):
        lines(tmp_path, [*part, ""], f"part-{place}.jsonl")
    environment = dataset(data=str(tmp_path / "part-*.jsonl"), prompt="{question}")
    assert shown(environment) == [row["question"] for row in ROWS]
    files = [str(tmp_path / "part-2.jsonl"), str(tmp_path / "part-0.jsonl")]
    assert shown(dataset(data=files, prompt="{question}")) == [row["question"] for row in [*ROWS[5:], *ROWS[:4]]]


GOOD = '{"prompt": "?", "answer": 1}'


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (f"{GOOD}\n\n{GOOD}\n{{'prompt'\n", r"rows.jsonl, line 4: it is not JSON \("),
        (f"{GOOD}\n[1]\n", "rows.jsonl, line 2: it is not an object but list"),
        (f"{GOOD}\n{'[' * 100_000}\n", r"rows.jsonl, line 2: it is not JSON \("),
        (f'{GOOD}\n{{"prompt": "?"}}\n', "line 2: there is no column 'answer', only prompt"),
        (f'{GOOD}\n{{"prompt": null, "answer": 1}}\n', "line 2: column 'prompt' is None, not text or a number"),
        (f'{GOOD}\n{{"prompt": "?", "answer": null}}\n', "line 2: column 'answer' has no answer"),
        ("\n\n", "rows.jsonl' has no rows"),
    ],
)
def test_a_bad_row_is_one_sentence_with_its_line(text: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(text)
    with pytest.raises(EnvironmentLoadError, match=sentence) as caught:
        sizes_of("dataset", dataset(data=str(tmp_path / "rows.jsonl")))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"m": "hi"}, "column 'm' is 'hi', not a list of messages"),
        ({"m": []}, r"column 'm' is \[\], not a list"),
        ({"m": [{"role": "tool", "content": "x"}]}, "not a message with a role and text"),
        ({"m": [{"role": "user", "content": [1]}]}, "not a message with a role and text"),
        ({"m": [{"role": "assistant", "content": "x"}]}, "ends with a message of the assistant"),
    ],
)
def test_bad_messages_are_one_sentence(row: dict[str, object], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(EnvironmentLoadError, match=sentence):
        len(dataset(data=lines(tmp_path, [row]), messages="m", answer=""))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"data": "no/such.jsonl"}, "no/such.jsonl does not exist"),
        ({"data": "no/such-*.jsonl"}, "matches no file"),
        ({"data": ["rows.csv", "b.csv"]}, "rows.csv does not exist"),
        ({"data": 3}, "is not a file, a folder, a name, or a list of files"),
        ({"data": "rows.jsonl", "prompt": "What?"}, "names no column"),
        ({"data": "rows.jsonl", "messages": "m", "system": "s"}, "leave out prompt and system"),
        ({"data": "rows.jsonl", "match": "fuzzy"}, "match = 'fuzzy' is not one of exact, last_number, math_verify"),
        ({"data": "rows.jsonl", "held_out": 1.5}, "held_out = 1.5 is neither"),
        ({"data": "rows.jsonl", "held_out": -1}, "held_out = -1 is neither"),
        ({"data": "rows.jsonl", "held_out": 2, "eval_split": "test"}, "exclude each other"),
        ({"data": "rows.jsonl", "pass_rate": [0.1, 0.9]}, "need pass_rates or pass_rate_column"),
        ({"data": "rows.jsonl", "pass_rates": "f", "pass_rate": [0.9, 0.1]}, "not a lower and an upper bound"),
        ({"data": "rows.jsonl", "pass_rates": "f", "pass_rate_column": "c"}, "two ways to say it"),
        ({"data": "rows.jsonl", "pass_rates": "f", "unmeasured": "maybe"}, "neither 'keep' nor 'drop'"),
        ({"data": "rows.jsonl", "answer": "", "answer_after": "#"}, "needs the column of the answer"),
        ({}, "cannot be made with options {}: it needs data"),
    ],
)
def test_bad_options_are_one_sentence(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(EnvironmentLoadError, match=sentence):
        len(dataset(**options))


def test_holding_out_everything_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentLoadError, match="held_out = 10 of 10 rows leaves none"):
        len(dataset(data=lines(tmp_path, ROWS), prompt="{question}", held_out=10))


def test_a_row_that_changed_since_it_was_checked_fails_its_rollout(tmp_path: Path) -> None:
    environment = dataset(data=lines(tmp_path, [GOOD, GOOD]))
    asyncio.run(environment.setup())  # type: ignore[attr-defined]
    lines(tmp_path, ["{", "}"])
    with pytest.raises(RolloutFailed, match=r"rows.jsonl, line 1: it is not JSON"):
        environment.episode("train", 0, 0)


@pytest.mark.parametrize(
    ("band", "unmeasured", "left"),
    [([0.2, 0.8], "keep", {2, 3, 5, 6, 7, 8, 9}), ([0.2, 0.8], "drop", {2, 3}), ([0.0, 0.1], "drop", {0, 1})],
)
def test_prompts_are_filtered_by_measured_pass_rate(
    band: list[float], unmeasured: str, left: set[int], tmp_path: Path
) -> None:
    file = tmp_path / "rates.jsonl"
    rates = {0: 0.0, 1: 0.1, 2: 0.2, 3: 0.8, 4: 1.0}
    write_pass_rates(file, (Measured(index, rate, 10) for index, rate in rates.items()))
    environment = dataset(
        data=lines(tmp_path, ROWS), prompt="{question}", pass_rates=str(file), pass_rate=band, unmeasured=unmeasured
    )
    assert shown(environment) == [ROWS[index]["question"] for index in sorted(left)]


def test_pass_rates_that_have_no_room_leave_those_before(tmp_path: Path) -> None:
    file = tmp_path / "rates.jsonl"
    write_pass_rates(file, [Measured(0, 0.5)])
    many = [Measured(index, 0.25) for index in range(100)]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_pass_rates(file, many)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert read_pass_rates(file, 100) == {0: 0.5}
    assert list(tmp_path.iterdir()) == [file]
    link = tmp_path / "link"
    link.symlink_to(file)
    write_pass_rates(link, many)
    assert link.is_symlink()
    assert len(read_pass_rates(file, 100)) == 100


def test_a_column_may_say_the_pass_rate(tmp_path: Path) -> None:
    rows = [*ROWS, {"question": "never asked", "answer": "", "rate": None}]
    options = {
        "data": lines(tmp_path, rows),
        "prompt": "{question}",
        "pass_rate_column": "rate",
        "pass_rate": [0.25, 0.5],
    }
    assert shown(dataset(**options, unmeasured="drop")) == [ROWS[index]["question"] for index in (3, 4, 5)]
    assert shown(dataset(**options))[-1] == "never asked"
    both = dataset(**options, held_out=4)
    assert not set(shown(both)) & set(shown(both, "eval"))
    assert both.eval_size() == 4


def test_indices_of_pass_rates_count_what_is_not_held_out(tmp_path: Path) -> None:
    options = {"data": lines(tmp_path, ROWS), "prompt": "{question}", "held_out": 4}
    unfiltered = shown(dataset(**options))
    file = tmp_path / "rates.jsonl"
    write_pass_rates(file, [Measured(5, 0.5)])
    assert shown(dataset(**options, pass_rates=str(file), unmeasured="drop")) == [unfiltered[5]]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"index": 1, "pass_rate": 0.5}\n{"index": 10, "pass_rate": 0}\n', "line 2: index 10 is not one of the 10"),
        ('{"index": -1, "pass_rate": 0.5}\n', "line 1: index -1"),
        ('{"index": 1, "pass_rate": 1.5}\n', "line 1: pass_rate 1.5 is not between"),
        ('{"index": 1, "pass_rate": 1, "samples": 0}\n', "samples 0"),
        ('\n{"index": 1}\n', "line 2: .*pass_rate"),
        ('{"x": ' + "[" * 100_000, "line 1: maximum recursion depth"),
        ("{\n", "line 1: "),
        ('{"index": 1, "pass_rate": 0}\n', "no prompt has a pass rate from 0.2 to 1; widen"),
        (None, "rates.jsonl cannot be read"),
    ],
)
def test_bad_pass_rates_are_one_sentence(text: str | None, sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "rates.jsonl"
    if text is not None:
        file.write_text(text)
    options = {"pass_rates": str(file), "pass_rate": [0.2, 1.0], "unmeasured": "drop"}
    with pytest.raises(EnvironmentLoadError, match=sentence):
        len(dataset(data=lines(tmp_path, ROWS), prompt="{question}", **options))


measurements = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 8), st.integers(1, 8)), max_size=30)


@given(measurements)
def test_several_measurements_of_a_prompt_are_pooled(
    tmp_path_factory: Any, measured: list[tuple[int, int, int]]
) -> None:
    file = tmp_path_factory.mktemp("rates") / "rates.jsonl"
    write_pass_rates(file, (Measured(i, min(p, n) / n, n) for i, p, n in measured))
    rates = read_pass_rates(file, 6)
    for index in range(6):
        of_it = [(min(p, n), n) for i, p, n in measured if i == index]
        assert (index in rates) is bool(of_it)
        if of_it:
            assert rates[index] == pytest.approx(sum(p for p, _ in of_it) / sum(n for _, n in of_it))
    inside = kept(6, rates, Band(0.25, 0.75, unmeasured=False))
    assert list(inside) == [index for index, rate in sorted(rates.items()) if 0.25 <= rate <= 0.75]
