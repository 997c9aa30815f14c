"""What lag costs in reward, and what it brings in time: 64 trainings of a tiny model on a clock of their own.

    figure                bar      what
    lag4_minus_lag0       ≥ -0.03  final reward of max_lag 4 less that of 0, after the same samples: lower bound
    lag4_mean_lag         ≥ 3      steps, of the groups that max_lag 4 trained on, warm-up included
    lag4_speedup          > 1      time to TARGET with max_lag 0, over that with 4: lower bound
    lag16_uncorrected     -        final reward of max_lag 16 without correction less that with: upper bound
    generation_share      -        share of a step without lag in which a batch is generated; the rest is training

A model of 43,000 parameters learns to count down (`benchmarks/learning_task.py`) from a fixed start, with `max_lag` 0,
1, 4 and 16, each with the project's loss as it is by default ("corrected": the importance ratio to the policy that
sampled, clipped and truncated) and with the same loss blind to who sampled ("uncorrected", in
`benchmarks/learning_losses.py`). Trainings of one seed have the same prompts and random numbers. Time is that of
`benchmarks/learning_clock.py`: counted in decode steps, not measured, and balanced: without lag half of it is
generation. Rewards are exact expectations of a version, not of the batch that happened to be drawn; that of a moment is
the mean over the last WINDOW versions. Bounds are the ends of two-sided 90 % intervals by Student's t over the paired
seeds, of the speed-up over its logarithm.
"""

from __future__ import annotations

import math
import statistics
import sys
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.learning_clock import MAX_NEW_TOKENS, PUBLISH, TRAIN, Course, Training
from benchmarks.learning_plot import plot
from benchmarks.learning_task import start
from benchmarks.report import Figure, arguments, report
from headrace.config import Config, ProducerConfig, RunConfig, SamplingConfig, StalenessConfig
from headrace.config_trainer import TrainerConfig

BARS: dict[str, float | None] = {
    "lag4_minus_lag0": -0.03,
    "lag4_mean_lag": 3.0,
    "lag4_speedup": math.nextafter(1.0, 2.0),
    "lag16_uncorrected": None,
    "generation_share": None,
}
LAGS = (0, 1, 4, 16)
SEEDS, QUICK_SEEDS = 8, 2
STEPS, GROUPS, GROUP_SIZE, SLOTS = 96, 8, 8, 64
SAMPLES = GROUPS * GROUP_SIZE
"""Of one step."""
LEARNING_RATE = 1.5e-3
"""The best for training without lag (docs/learning.md)."""
PARTS = 6
"""Of the samples, or of the time, at which rewards are printed."""
WINDOW = 16
TARGET = 0.7
"""The reward to which time is counted; the start has 0.34."""
CORRECTIONS = ("auto", "ratio", "token", "sequence")
"""Of `trainer.correction`."""
UNCORRECTED = "benchmarks.learning_losses:uncorrected"
T95 = {1: 6.314, 2: 2.920, 3: 2.353, 4: 2.132, 5: 2.015, 6: 1.943, 7: 1.895}
"""The 95th percentile of Student's t, by degrees of freedom."""


@dataclass(frozen=True, slots=True, order=True)
class Setting:
    max_lag: int
    corrected: bool

    def __str__(self) -> str:
        return f"lag {self.max_lag}{'' if self.corrected else ', uncorrected'}"


Courses = Mapping[Setting, Sequence[Course]]
"""One for each seed."""


@dataclass(frozen=True, slots=True)
class Interval:
    """The mean of what paired seeds say, and its two-sided 90 % interval."""

    low: float
    mean: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        mean = statistics.fmean(values)
        reach = T95[len(values) - 1] * statistics.stdev(values) / math.sqrt(len(values))
        return cls(mean - reach, mean, mean + reach)


def configuration(setting: Setting, seed: int, *, steps: int, learning_rate: float, correction: str = "auto") -> Config:
    """Of one training; `correction` is that of the corrected ones."""
    trainer: dict[str, Any] = {"correction": correction} if setting.corrected else {"loss": UNCORRECTED}
    return Config(
        run=RunConfig(steps=steps, seed=seed),
        sampling=SamplingConfig(max_new_tokens=MAX_NEW_TOKENS),
        producer=ProducerConfig(slots=SLOTS),
        staleness=StalenessConfig(max_lag=setting.max_lag),
        trainer=TrainerConfig(
            groups_per_step=GROUPS, group_size=GROUP_SIZE, learning_rate=learning_rate, autocast="off", **trainer
        ),
    )


def reward_at(course: Course, version: int) -> float:
    """Mean over the last WINDOW versions up to this one."""
    return statistics.fmean(course.rewards[max(0, version + 1 - WINDOW) : version + 1])


def final_reward(course: Course) -> float:
    return reward_at(course, len(course.rewards) - 1)


def time_to(course: Course, target: float) -> int | None:
    """Decode steps until the reward is at `target`; None where it never is."""
    reached = (time for version, time in enumerate(course.times) if reward_at(course, version) >= target)
    return next(reached, None)


def differences(courses: Courses, setting: Setting, to: Setting) -> Interval:
    """Final reward, less that of `to`."""
    pairs = zip(courses[setting], courses[to], strict=True)
    return Interval.of([final_reward(one) - final_reward(other) for one, other in pairs])


def speedup(courses: Courses, setting: Setting, to: Setting) -> Interval:
    """Time to TARGET with `to`, over that with `setting`. One of `to` that never comes there counts with all its time,
    which is too little; one of `setting` that never does makes it 0.
    """
    ratios = []
    for one, other in zip(courses[setting], courses[to], strict=True):
        time = time_to(one, TARGET)
        if time is None:
            return Interval(0.0, 0.0, 0.0)
        ratios.append(math.log((time_to(other, TARGET) or other.times[-1]) / time))
    logs = Interval.of(ratios)
    return Interval(math.exp(logs.low), math.exp(logs.mean), math.exp(logs.high))


def mean_lag(courses: Sequence[Course]) -> float:
    return statistics.fmean(lag for course in courses for lag in course.lags)


def figures(courses: Courses) -> dict[str, Figure]:
    without, four = Setting(0, True), Setting(4, True)
    cost, gain = differences(courses, four, without), speedup(courses, four, without)
    correction = differences(courses, Setting(16, False), Setting(16, True))
    steps = sum(len(course.times) - 1 for course in courses[without])
    step_time = sum(course.times[-1] for course in courses[without]) / steps
    return {
        "lag4_minus_lag0": Figure(cost.low, "reward", bar=BARS["lag4_minus_lag0"]),
        "lag4_mean_lag": Figure(mean_lag(courses[four]), "steps", bar=BARS["lag4_mean_lag"]),
        "lag4_speedup": Figure(gain.low, "", bar=BARS["lag4_speedup"]),
        "lag16_uncorrected": Figure(correction.high, "reward"),
        "generation_share": Figure((step_time - TRAIN - PUBLISH) / step_time, ""),
    }


def in_order(courses: Courses) -> list[tuple[Setting, Sequence[Course]]]:
    return sorted(courses.items(), key=lambda item: (not item[0].corrected, item[0].max_lag))


def outcome(courses: Courses) -> Table:
    """Realised lag, share of stale groups, final reward, time to TARGET; beside max_lag 0 with correction."""
    found = _table("", "lag", "stale", "final", "less lag 0", f"to {TARGET:g}", "speed-up")
    without = Setting(0, True)
    for setting, some in in_order(courses):
        cost, gain = differences(courses, setting, without), speedup(courses, setting, without)
        times = [time for course in some if (time := time_to(course, TARGET)) is not None]
        groups = sum(len(course.lags) + course.stale for course in some)
        found.add_row(
            str(setting),
            f"{mean_lag(some):.2f}",
            f"{sum(course.stale for course in some) / groups:.1%}",
            f"{statistics.fmean(map(final_reward, some)):.3f}",
            f"{cost.mean:+.3f} ± {cost.high - cost.mean:.3f}",
            f"{statistics.fmean(times):.0f}" if len(times) == len(some) else f"{len(times)} of {len(some)}",
            f"{gain.low:.2f}-{gain.high:.2f}" if gain.mean else "",
        )
    return found


def against_samples(courses: Courses) -> Table:
    """Reward of each setting's versions, mean over seeds."""
    steps = len(courses[Setting(0, True)][0].rewards) - 1
    shown = [steps * part // PARTS for part in range(PARTS + 1)]
    found = _table("after samples", *(f"{version * SAMPLES:,}" for version in shown))
    for setting, some in in_order(courses):
        means = (statistics.fmean(reward_at(course, version) for course in some) for version in shown)
        found.add_row(str(setting), *(f"{mean:.3f}" for mean in means))
    return found


def against_time(courses: Courses) -> Table:
    """The same by time, for half of what training without lag takes; empty where a training has ended before."""
    end = max(course.times[-1] for course in courses[Setting(0, True)])
    shown = [end * part // (2 * PARTS) for part in range(PARTS + 1)]
    found = _table("after decode steps", *(f"{time:,}" for time in shown))
    for setting, some in in_order(courses):
        cells = []
        for time in shown:
            means = (reward_at(course, bisect_right(course.times, time) - 1) for course in some)
            cells.append("" if any(course.times[-1] < time for course in some) else f"{statistics.fmean(means):.3f}")
        found.add_row(str(setting), *cells)
    return found


def _table(*headings: str) -> Table:
    found = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for place, heading in enumerate(headings):
        found.add_column(heading, justify="right" if place else "left", no_wrap=True)
    return found


def sentence(courses: Courses) -> str:
    """Whether the correction is seen to be worth something."""
    found = differences(courses, Setting(16, False), Setting(16, True))
    interval = f"{found.mean:+.3f} (90 % interval {found.low:+.3f} to {found.high:+.3f})"
    if found.high < 0:
        return f"Without correction, training with max_lag 16 ends worse than with it: reward {interval}."
    return f"The task cannot tell what the correction is worth at max_lag 16: reward {interval} without it."


def main(argv: Sequence[str]) -> int:
    parser = arguments(__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_SEEDS} seeds for a look; bounds are wide then")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw reward against samples and time there, as SVG")
    parser.add_argument("--first-seed", type=int, default=0, help="the seeds count from here (default 0)")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"optimizer steps (default {STEPS})")
    parser.add_argument("--learning-rate", type=float, default=LEARNING_RATE, help=f"(default {LEARNING_RATE:g})")
    parser.add_argument("--correction", choices=CORRECTIONS, default="auto", help="of the corrected (default auto)")
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    model = start()
    seeds = range(given.first_seed, given.first_seed + (QUICK_SEEDS if given.quick else SEEDS))
    settings = [Setting(lag, corrected) for lag in LAGS for corrected in (True, False)]
    courses: dict[Setting, list[Course]] = {setting: [] for setting in settings}
    plan = [(seed, setting) for seed in seeds for setting in settings]
    for seed, setting in track(plan, "trainings", console=Console(stderr=True)):
        config = configuration(
            setting, seed, steps=given.steps, learning_rate=given.learning_rate, correction=given.correction
        )
        courses[setting].append(Training(model, config).run())
    console = Console()
    for shown in (against_samples(courses), against_time(courses), outcome(courses), sentence(courses)):
        console.print(shown, "")
    if given.plot is not None:
        given.plot.write_text(plot({str(setting): some for setting, some in courses.items()}, SAMPLES), "utf-8")
    title = f"learning, {len(seeds)} seeds of {given.steps * SAMPLES:,} samples; time in decode steps"
    return report(title, figures(courses), json_file=given.json, check=given.check)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
