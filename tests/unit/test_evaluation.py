"""What an evaluation makes of its groups, and what it knows again of an earlier trainer's."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.messages import Group, Trajectory, VersionSpan
from consumers.evaluation import (
    JOURNAL,
    MOST_ASKED,
    Answer,
    Done,
    Evaluation,
    Example,
    Judged,
    Prompt,
    Result,
    kept_in,
    ks_of,
    mixture,
    paired,
    pass_at_k,
    result_of,
    results_in,
)
from headrace.errors import CheckpointError
from headrace.version import PolicyVersion

VERSION, NEXT = PolicyVersion(1, 4), PolicyVersion(1, 5)


def words(ids: np.ndarray) -> str:
    return " ".join(f"w{i}" for i in ids)


def begun(prompts: int = 3, **environments: int) -> Evaluation:
    return Evaluation("step", VERSION, environments or {"sums": prompts}, 2, pinned=True)


def group(of: Evaluation, index: int, *rewards: float, again: int = 0, environment: str = "sums") -> Group:
    mask = np.array([False, False, True, True])
    spans = (VersionSpan(2, 4, of.version),)
    members = tuple(
        Trajectory(np.array([1, 2, 30 + index, 4], np.int32), np.zeros(4, np.float32), mask, spans, reward, "stop")
        for reward in rewards
    )
    task = of.task_id(Prompt(environment, index, again))
    return Group(task, 1, "eval", environment, index, "p", members)


def spanned(one: Group, *spans: VersionSpan) -> Group:
    return replace(one, trajectories=tuple(replace(member, spans=spans) for member in one.trajectories))


def judge(of: Evaluation, one: Group) -> Judged:
    """As the trainer does: what is judged is entered."""
    judged = of.judge(one, words)
    if judged.again is not None:
        of.ask_again(judged.again)
    if judged.answer is not None:
        of.enter(judged.answer)
    return judged


def test_it_is_over_when_every_prompt_has_answered() -> None:
    made = begun(2)
    assert judge(made, group(made, 1, 1, 0, 1)).verdict == "evaluated"
    assert (made.missing, made.total) == (1, 2)
    assert judge(made, group(made, 1, 1)) == Judged("evaluated"), "a second answer changes nothing"
    judge(made, group(made, 0, 0))
    result = made.result()
    assert (made.missing, result.samples, result.failed) == (0, 4, 0)
    assert result.accuracy == pytest.approx(0.5)
    assert result.examples == (Example(0, "w1 w2", "w30 w4", 0), Example(1, "w1 w2", "w31 w4", 1))


@pytest.mark.parametrize(
    "task",
    ["train-00000001", "eval-before-1-000001", "eval-1.4-0-000003", "eval-1.4-1-000000", "eval-1.40-0-000001", ""],
)
def test_what_belongs_to_no_prompt_of_it_is_superseded(task: str) -> None:
    made = begun()
    judged = judge(made, replace(group(made, 1, 1), task_id=task))
    assert (judged.verdict, judged.answer, judged.again) == ("superseded", None, None)
    assert made.missing == 3


def test_rollouts_of_another_version_are_refused_and_asked_again_up_to_a_bound() -> None:
    made = begun(1)
    for again in range(MOST_ASKED):
        mixed = spanned(group(made, 0, 1, again=again), VersionSpan(2, 3, VERSION), VersionSpan(3, 4, NEXT))
        judged = judge(made, mixed)
        assert (judged.verdict, judged.reason) == ("filtered", "it was not sampled on one version alone")
        last = again == MOST_ASKED - 1
        assert judged.again == (None if last else Prompt("sums", 0, again + 1))
    result = made.result()
    assert (made.missing, result.samples, result.failed, result.accuracy, result.pass_at) == (0, 0, 1, 0.0, {})


def test_the_group_of_an_earlier_asking_counts_and_its_failure_asks_nothing_more() -> None:
    made = begun(1)
    failed = replace(group(made, 0), outcome="failed", error="reward raised")
    assert judge(made, failed).again == Prompt("sums", 0, 1)
    assert judge(made, failed) == Judged("failed", "reward raised"), "it has been asked again by then"
    assert judge(made, group(made, 0, 1)).verdict == "evaluated"
    assert made.missing == 0
    assert judge(made, group(made, 0, 1, again=1)) == Judged("evaluated")


def test_keys_and_values_of_another_version_are_a_mixture_too() -> None:
    made = begun()
    one = group(made, 0, 1)
    assert mixture(one, VERSION) == ""
    assert "one version alone" in mixture(one, NEXT)
    assert "keys and values" in mixture(spanned(one, VersionSpan(2, 4, VERSION, "kept")), VERSION)


def test_a_group_that_names_another_prompt_than_its_task_is_no_answer() -> None:
    made = begun()
    judged = judge(made, replace(group(made, 1, 1), index=0))
    assert (judged.reason, judged.answer) == ("it answers another prompt", None)
    assert "not finite" in judge(made, group(made, 2, float("nan"))).reason


def test_environments_have_results_of_their_own_beside_the_common_one() -> None:
    made = begun(sums=1, logic=1)
    judge(made, group(made, 0, 1, 1))
    judge(made, group(made, 0, 0, 0, environment="logic"))
    result = made.result()
    assert (result.accuracy, result.pass_at) == (0.5, {"1": 0.5, "2": 0.5})
    assert result.environments["sums"] == {"samples": 2, "accuracy": 1.0, "failed": 0, "pass_at": {"1": 1.0, "2": 1.0}}
    assert result.environments["logic"]["accuracy"] == 0.0
    assert [example.index for example in result.examples] == [0], "of the first environment alone"


def test_examples_are_those_of_the_first_prompts_whatever_the_order() -> None:
    made = begun(10)
    for index in reversed(range(10)):
        judge(made, group(made, index, 1))
    assert [example.index for example in made.result().examples] == [0, 1, 2, 3, 4, 5]


def test_before_and_after_stand_side_by_side() -> None:
    before = Result(1, 0.0, 0, {}, (Example(2, "2+2", "5", 0.0),))
    after = Result(1, 1.0, 0, {}, (Example(1, "1+1", "2", 1.0), Example(2, "2+2", "4", 1.0)))
    assert paired(before, after) == [
        {"prompt": "1+1", "after": "2", "reward_after": 1.0},
        {"prompt": "2+2", "before": "5", "reward_before": 0.0, "after": "4", "reward_after": 1.0},
    ]
    assert paired(None, None) == []


@given(samples=st.integers(1, 9), data=st.data())
def test_pass_at_k_is_the_share_of_all_choices_of_k_with_a_right_one(samples: int, data: st.DataObject) -> None:
    right = data.draw(st.integers(0, samples))
    k = data.draw(st.integers(1, samples))
    choices = list(combinations([index < right for index in range(samples)], k))
    assert pass_at_k(samples, right, k) == pytest.approx(sum(map(any, choices)) / len(choices), abs=1e-12)


def test_pass_at_k_of_many_samples_and_of_nothing() -> None:
    assert pass_at_k(4096, 1, 2048) == pytest.approx(0.5)
    for wrong in ((4, 2, 5), (4, 5, 1), (4, 2, 0), (0, 0, 1)):
        with pytest.raises(ValueError, match="is nothing"):
            pass_at_k(*wrong)
    assert [ks_of(n) for n in (0, 1, 4, 6)] == [[], [1], [1, 2, 4], [1, 2, 4, 6]]


def test_a_prompt_with_too_few_samples_is_left_out_of_larger_ks() -> None:
    answers = [Answer("sums", 0, 1, 4), Answer("sums", 1, 0, 2), Answer("sums", 2, 0, 0)]
    result = result_of(answers)
    assert (result.samples, result.failed) == (6, 1)
    assert result.pass_at == {"1": pytest.approx(0.125), "2": pytest.approx(0.25), "4": 1.0}


# -- the journal

BEGIN = {"event": "begin", "when": "step", "version": "1.4", "prompts": {"sums": 3}, "samples": 2, "pinned": True}
ANSWER = {"event": "answer", "version": "1.4", "environment": "sums", "index": 1, "right": 1, "answered": 2}
AGAIN = {"event": "again", "version": "1.4", "environment": "sums", "index": 2, "again": 2, "reason": "mixed"}


def journal(folder: Path, *lines: object) -> Path:
    (folder / JOURNAL).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_what_goes_on_is_known_again_to_the_prompt(tmp_path: Path) -> None:
    assert kept_in(tmp_path).going is None
    example = {"index": 1, "prompt": "1+1", "completion": "2", "reward": 1.0}
    kept = kept_in(journal(tmp_path, BEGIN, {**ANSWER, "example": example}, AGAIN, {**ANSWER, "version": "1.9"}))
    going = kept.going
    assert going is not None
    assert (going.version, going.pinned, going.missing) == (VERSION, True, 2)
    assert going.asks() == [Prompt("sums", 0), Prompt("sums", 2, 2)]
    assert going.result().examples == (Example(1, "1+1", "2", 1.0),)
    assert [going.task_id(prompt) for prompt in going.asks()] == ["eval-1.4-0-000000", "eval-1.4-0-000002.2"]


def test_what_has_a_result_or_was_given_up_does_not_go_on(tmp_path: Path) -> None:
    kept = kept_in(journal(tmp_path, BEGIN, ANSWER, {"event": "result", "version": "1.4"}))
    assert (kept.going, [done.result.samples for done in kept.done]) == (None, [2])
    kept = kept_in(journal(tmp_path, BEGIN, ANSWER, {"event": "given_up", "version": "1.4"}))
    assert (kept.going, kept.done) == (None, [])


@pytest.mark.parametrize("line", ["{", '{"event": "begin"}', '{"event": "begin", "version": "x"}', "[]"])
def test_a_damaged_journal_says_what_to_do(tmp_path: Path, line: str) -> None:
    (tmp_path / JOURNAL).write_text(line + "\n")
    with pytest.raises(CheckpointError, match=r"evaluations.jsonl cannot be read: .*; remove it to evaluate again"):
        kept_in(tmp_path)


def test_results_are_read_without_the_rest() -> None:
    made = begun(1)
    judge(made, group(made, 0, 1, 0))
    shown = Done.of(made).shown()
    assert (shown["version"], shown["step"], shown["accuracy"]) == ("1.4", 4, 0.5)
    line = json.dumps({"time": 1.0, "event": "result", **shown})
    assert results_in([json.dumps(BEGIN), line, line[:20], "7"]) == [shown]
