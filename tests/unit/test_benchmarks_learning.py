"""The learning benchmark: its task, its clock, and what it says of trainings whose outcome is known."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from rich.table import Table

from audit import svg
from benchmarks import learning
from benchmarks import learning_task as task
from benchmarks.learning import Interval, Setting, configuration, figures, final_reward, sentence, speedup, time_to
from benchmarks.learning_clock import TRAIN, Course, Training
from benchmarks.learning_losses import uncorrected
from benchmarks.learning_plot import plot
from consumers.losses.grpo import grpo
from consumers.losses.tokens import Denominators, LossSettings, LossTokens
from consumers.trainer import StepResult

RATE = 1e-3


@pytest.fixture(scope="module")
def start() -> Any:
    return task.start()


def trained(start: Any, max_lag: int, steps: int, *, corrected: bool = True) -> tuple[Training, list[StepResult]]:
    """A whole training, and what its trainer said of each step."""
    config = configuration(Setting(max_lag, corrected), 3, steps=steps, learning_rate=RATE)
    training, results = Training(start, config), []
    train = training._trainer.train

    def noted(*arguments: Any) -> StepResult:
        results.append(train(*arguments))
        return results[-1]

    training._trainer.train = noted  # type: ignore[method-assign]
    training.run()
    return training, results


# -- the task


def test_one_answer_is_right() -> None:
    (index,) = (index for index in range(task.PROMPTS) if task.question(index) == (2, 7))
    right = np.array([5, 3, 1, task.END], np.int32)
    assert np.array_equal(task.answer(index), right)
    assert task.reward(index, right) == 1.0
    for wrong in (right[:-1], [5, 3, 2, task.END], [*right, task.END], []):
        assert task.reward(index, np.array(wrong, np.int32)) == 0.0


def test_prompts_differ_and_answers_fit() -> None:
    assert len({task.prompt(index).tobytes() for index in range(task.PROMPTS)}) == task.PROMPTS
    lengths = [task.answer(index).size for index in range(task.PROMPTS)]
    assert max(lengths) == task.LONGEST
    assert max(lengths) > 2.5 * np.mean(lengths)


def test_the_expected_reward_is_exact(start: Any) -> None:
    """Against a plain forward pass of each prompt with its answer."""
    model = task.start()
    model.set_attn_implementation("eager")
    chances = []
    for index in range(task.PROMPTS):
        tokens = torch.from_numpy(np.concatenate([task.prompt(index), task.answer(index)]).astype(np.int64))
        with torch.no_grad():
            logprobs = torch.log_softmax(model(tokens[None]).logits[0].double(), dim=-1)
        chances.append(float(sum(logprobs[at - 1, tokens[at]] for at in range(2, len(tokens))).exp()))
    assert task.Examination(start).expected_reward() == pytest.approx(np.mean(chances), abs=1e-6)


def test_the_start_is_fixed_and_leaves_the_random_numbers_alone() -> None:
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    one, other = task.start(), task.start()
    assert torch.rand(1) == expected
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


# -- the loss


def loss_tokens(logprobs_N: torch.Tensor, behaviour_N: torch.Tensor) -> LossTokens:
    ones_N = torch.ones_like(behaviour_N)
    advantages_N = torch.tensor([1.0, 1.0, -0.5, -0.5])
    return LossTokens(
        logprobs_N, behaviour_N, advantages_N, 2 * ones_N, torch.tensor([0, 0, 1, 1]), behaviour_N, ones_N
    )


def gradient(loss: Any, behaviour_N: torch.Tensor) -> torch.Tensor:
    logprobs_N = torch.tensor([-1.0, -2.0, -0.5, -3.0], requires_grad=True)
    loss(loss_tokens(logprobs_N, behaviour_N), Denominators(2, 4, 8), LossSettings()).backward()
    assert logprobs_N.grad is not None
    return logprobs_N.grad


def test_uncorrected_is_the_same_loss_on_the_policy_and_blind_off_it() -> None:
    on_N, off_N = torch.tensor([-1.0, -2.0, -0.5, -3.0]), torch.tensor([-1.4, -2.0, -0.4, -4.0])
    assert torch.equal(gradient(uncorrected, on_N), gradient(grpo, on_N))
    assert torch.equal(gradient(uncorrected, off_N), gradient(uncorrected, on_N))
    assert not torch.allclose(gradient(grpo, off_N), gradient(grpo, on_N))


# -- the clock


def test_without_lag_every_token_is_of_the_version_that_is_trained(start: Any) -> None:
    training, results = trained(start, 0, 4)
    assert set(training.course.lags) == {0}
    assert training.course.stale == 0
    assert all(result.drift.mismatch < 1e-5 for result in results)
    assert all(result.drift.engine_tokens > 0 for result in results)
    assert training.course.rewards[-1] > training.course.rewards[0]


def test_without_lag_the_correction_changes_nothing(start: Any) -> None:
    with_it, without = (trained(start, 0, 4, corrected=corrected)[0].course for corrected in (True, False))
    assert with_it.rewards == pytest.approx(without.rewards, abs=1e-4)
    assert with_it.times == without.times


@pytest.fixture(scope="module")
def late(start: Any) -> tuple[Training, list[StepResult]]:
    return trained(start, 4, 16)


def test_with_lag_the_pipeline_is_full(late: tuple[Training, list[StepResult]]) -> None:
    training, results = late
    course = training.course
    assert len(course.lags) == 16 * learning.GROUPS
    assert max(course.lags) == 4
    assert np.mean(course.lags[8 * learning.GROUPS :]) > 3
    assert all(result.drift.mismatch > 1e-4 for result in results[4:])


def test_with_lag_the_trainer_never_waits_but_at_first(late: tuple[Training, list[StepResult]]) -> None:
    times = late[0].course.times
    assert set(np.diff(times[1:])) == {TRAIN}


def test_without_lag_a_step_is_generation_and_training(start: Any) -> None:
    steps = np.diff(trained(start, 0, 4)[0].course.times)
    assert (steps > 1.6 * TRAIN).all()
    assert (steps < 2.6 * TRAIN).all()


def test_every_task_has_an_end(late: tuple[Training, list[StepResult]]) -> None:
    training, _ = late
    course = training.course
    assert course.stale > 0
    assert not training._waiting
    assert not training._playing
    assert len(training._batcher) == 0
    asked = training._cursor + training._asked_again
    assert asked == len(course.lags) + course.stale


def test_a_training_is_the_same_again(start: Any, late: tuple[Training, list[StepResult]]) -> None:
    again = trained(start, 4, 16)[0].course
    assert again == late[0].course
    other = configuration(Setting(4, True), 4, steps=16, learning_rate=RATE)
    assert Training(start, other).run().rewards != again.rewards


# -- what is said of it


def course(reward: float, pace: int = 10, lag: int = 0) -> Course:
    """Rises to `reward` within 20 of 40 versions, a version each `pace`."""
    rises = [reward * min(1.0, version / 20) for version in range(41)]
    return Course(rewards=rises, times=[pace * version for version in range(41)], lags=[lag] * 40)


def courses(**changes: Sequence[Course]) -> dict[Setting, list[Course]]:
    found = {
        Setting(lag, corrected): [course(0.8), course(0.9)] for lag in learning.LAGS for corrected in (True, False)
    }
    found[Setting(4, True)] = [course(0.8, 5, 4), course(0.9, 5, 3)]
    names = {"lag4": Setting(4, True), "lag16": Setting(16, False)}
    return found | {names[name]: list(some) for name, some in changes.items()}


def test_intervals_are_those_of_student() -> None:
    # 4 values of mean 5 and variance 20 / 3: t is 2.353 at three degrees of freedom.
    found = Interval.of([2.0, 4.0, 6.0, 8.0])
    assert found.mean == 5.0
    assert found.high - 5.0 == pytest.approx(2.353 * (20 / 3 / 4) ** 0.5)
    assert found.low == pytest.approx(10.0 - found.high)


def test_time_is_counted_to_the_mean_of_the_last_versions() -> None:
    one = course(0.9)
    reached = time_to(one, 0.6)
    assert reached is not None
    version = reached // 10
    assert np.mean(one.rewards[version - 15 : version + 1]) >= 0.6 > np.mean(one.rewards[version - 16 : version])
    assert time_to(one, 0.95) is None
    assert final_reward(one) == pytest.approx(0.9)


def test_what_is_as_good_and_twice_as_fast_holds() -> None:
    found = figures(courses())
    assert found["lag4_minus_lag0"].value == pytest.approx(0.0)
    assert found["lag4_mean_lag"].value == 3.5
    assert found["lag4_speedup"].value == pytest.approx(2.0)
    assert all(figure.holds in (True, None) for figure in found.values())


@pytest.mark.parametrize(
    ("lag4", "missed"),
    [
        ([course(0.7, 5, 4), course(0.8, 5, 4)], "lag4_minus_lag0"),
        # As good on average, and not to be relied on.
        ([course(0.7, 5, 4), course(1.0, 5, 4)], "lag4_minus_lag0"),
        ([course(0.8, 5, 2), course(0.9, 5, 3)], "lag4_mean_lag"),
        ([course(0.8, 10, 4), course(0.9, 10, 4)], "lag4_speedup"),
        ([course(0.8, 9, 4), course(0.55, 5, 4)], "lag4_speedup"),
    ],
)
def test_what_is_worse_is_missed(lag4: list[Course], missed: str) -> None:
    assert figures(courses(lag4=lag4))[missed].holds is False


def test_one_without_lag_that_never_comes_there_makes_no_speedup() -> None:
    found = courses()
    found[Setting(0, True)] = [course(0.5), course(0.9)]
    reached = time_to(course(0.8, 5), learning.TARGET)
    assert reached is not None
    least = [400 / reached, 2.0]
    assert speedup(found, Setting(4, True), Setting(0, True)).mean == pytest.approx(np.prod(least) ** 0.5)


def test_it_says_when_it_cannot_tell() -> None:
    assert "cannot tell" in sentence(courses())
    assert "cannot tell" in sentence(courses(lag16=[course(0.4), course(0.9)]))
    assert "ends worse" in sentence(courses(lag16=[course(0.4), course(0.51)]))


def printed(table: Table) -> dict[str, list[str]]:
    """Cells by setting."""
    columns = [[str(cell) for cell in column.cells] for column in table.columns]
    return {name: list(cells) for name, *cells in zip(*columns, strict=True)}


def test_tables_hold_every_setting() -> None:
    slow = course(0.5)
    found = courses(lag16=[slow, course(0.9)])
    assert printed(learning.outcome(found))["lag 4"][:2] == ["3.50", "0.0%"]
    assert "1 of 2" in printed(learning.outcome(found))["lag 16, uncorrected"]
    assert printed(learning.against_samples(found))["lag 4"] == printed(learning.against_samples(found))["lag 0"]
    by_time = printed(learning.against_time(found))
    assert all(float(four) > float(none) for four, none in zip(by_time["lag 4"][1:], by_time["lag 0"][1:], strict=True))
    found[Setting(4, True)] = [course(0.8, 5, 4), course(0.9, 4, 4)]  # the second one ends at 160
    assert [cell == "" for cell in printed(learning.against_time(found))["lag 4"]] == [False] * 5 + [True] * 2
    assert list(by_time) == [str(setting) for setting, _ in learning.in_order(found)]


def test_the_plot_is_a_file_of_its_own() -> None:
    drawn = ElementTree.fromstring(plot({str(setting): some for setting, some in courses().items()}, 64))
    names = [title.text for title in drawn.iter("{http://www.w3.org/2000/svg}title")]
    assert sorted(names) == sorted(2 * [str(setting) for setting in courses()])
    dashed = [line for line in drawn.iter("{http://www.w3.org/2000/svg}polyline") if "stroke-dasharray" in line.attrib]
    assert len(dashed) == 2 * len(learning.LAGS)


def test_lines_reach_from_corner_to_corner() -> None:
    drawn = svg.lines({"<a>": svg.Line([(0.0, 0.0), (10.0, 1.0)], "#123456")}, "s", "tokens", "label")
    assert f'points="40.0,{svg.HEIGHT - 34:.1f} {svg.WIDTH - 8:.1f},10.0"' in drawn
    assert "&lt;a&gt;" in drawn


def test_the_whole_of_it(tmp_path: Path) -> None:
    """All settings with two seeds, a few steps each."""
    given = ["--quick", "--steps", "2", "--json", str(tmp_path / "json"), "--plot", str(tmp_path / "svg"), "--check"]
    assert learning.main(given) == 1  # two steps fill no pipeline
    told = json.loads((tmp_path / "json").read_text())["figures"]
    assert set(told) == set(learning.BARS)
    assert told["lag4_mean_lag"]["holds"] is False
    assert ElementTree.parse(tmp_path / "svg").getroot().tag.endswith("svg")
