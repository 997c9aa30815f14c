"""What to change next: each lever with what it may gain at most, and whether kernels are worth tuning yet. Pure.

A lever takes its seconds off the critical path, and a step then takes at least what its busiest part works for it
(`Rates.bound_s`): so the gain is an upper bound, and levers can be compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from audit.figures import Figures
from audit.intensity import Use, uses
from audit.path import Kind, Segment
from audit.rates import Rates
from audit.records import Run
from audit.split import Split
from audit.verdict import QUEUED, SATURATED, Bottleneck

LeverName = Literal[
    "producers", "refill", "placement", "staleness_bound", "reward_concurrency", "weight_sync", "checkpoint", "kernels"
]
LEVER_OF: Mapping[str, LeverName] = {
    "reward": "reward_concurrency",
    "straggler": "producers",
    "weight_sync": "weight_sync",
    "checkpoint": "checkpoint",
    "staleness_bound": "staleness_bound",
    "too_few_producers": "producers",
    "too_many_producers": "producers",
    "trainer": "kernels",
    "device": "kernels",
}
"""Bottleneck to the lever that is its remedy."""
TAKES_TURNS = frozenset({"staleness_bound", "weight_sync", "trainer", "too_many_producers"})
"""Bottlenecks that devices which wait for each other explain, so that sharing one may be cheaper."""
WORTH = 1.02
"""Gain from which on a lever is named."""


@dataclass(frozen=True, slots=True)
class Lever:
    name: LeverName
    gain: float
    """Samples per device-hour afterwards over those of now, at most."""
    why: str
    how: str
    """What to type or to set."""


@dataclass(frozen=True, slots=True)
class Sign:
    """One of the five signs that tuning kernels would not help yet."""

    name: str
    seen: bool | None
    """None where the run did not record what it takes to tell."""
    evidence: str


def levers_of(
    run: Run,
    figures: Figures,
    rates: Rates,
    split: Split | None,
    path: Sequence[Segment],
    bottleneck: Bottleneck,
) -> list[Lever]:
    """The bottleneck's own lever first, then by gain; those that gain nothing are left out."""
    spent: dict[Kind, float] = {}
    for segment in path:
        spent[segment.kind] = spent.get(segment.kind, 0.0) + segment.seconds / max(1, figures.steps)
    first = LEVER_OF.get(bottleneck.name)
    found = [
        lever
        for lever in _all(run, rates, split, spent, path, bottleneck)
        if lever.gain >= WORTH or lever.name == first
    ]
    return sorted(found, key=lambda lever: (lever.name != first, -lever.gain))


def overlap_s(rates: Rates) -> float:
    """Seconds of a step that perfect overlapping of the parts that there are would save."""
    return max(0.0, rates.period_s - rates.bound_s())


def _all(
    run: Run,
    rates: Rates,
    split: Split | None,
    spent: Mapping[Kind, float],
    path: Sequence[Segment],
    bottleneck: Bottleneck,
) -> Iterator[Lever]:
    def without(kind: Kind, share: float = 1.0) -> float:
        """Gain of taking a share of a kind's seconds off the path."""
        left = rates.period_s - share * spent.get(kind, 0.0)
        return rates.period_s / max(left, _others(rates, kind), 1e-9)

    workers = int(run.config.get("producer", {}).get("reward_workers", 1))
    yield Lever(
        "reward_concurrency",
        without("scoring"),
        f"{spent.get('scoring', 0.0):.2f} s of a step are spent waiting for rewards",
        f"producer.reward_workers = {2 * workers} or more, or a faster reward",
    )
    yield Lever(
        "weight_sync",
        without("weight_sync"),
        f"{spent.get('weight_sync', 0.0):.2f} s of a step are spent publishing, bringing and taking in weights",
        "weights.transport, weights.codec, weights.staging_share; a faster link, or producers on the trainer's host",
    )
    every = int(run.config.get("checkpoint", {}).get("every", 1))
    yield Lever(
        "checkpoint",
        without("checkpoint", 1 - every / (4 * every)),
        f"{spent.get('checkpoint', 0.0):.2f} s of a step are spent writing checkpoints",
        f"checkpoint.every = {4 * every}, or a faster disk for the run's folder",
    )
    if bottleneck.name not in ("reward", "weight_sync", "checkpoint", "straggler"):
        yield Lever(
            "staleness_bound",
            rates.period_s / max(rates.bound_s(), 1e-9),
            f"perfect overlapping would save {overlap_s(rates):.2f} s of a step",
            f"staleness.max_lag = {run.max_lag + 1}: it buys throughput with staleness, so look at the reward as well",
        )
    yield from _producers(rates, split, bottleneck)
    yield from _devices(rates, path, spent, bottleneck)


def _producers(rates: Rates, split: Split | None, bottleneck: Bottleneck) -> Iterator[Lever]:
    if bottleneck.name == "straggler":
        yield Lever(
            "producers",
            rates.period_s / max(rates.bound_s(), 1e-9),
            bottleneck.sentence,
            f"find out why {bottleneck.subject} is slow, or replace it: `headrace scale producer N` drains the newest",
        )
    elif split is not None and split.recommended.producers != round(rates.producers):
        now, then = split.now, split.recommended
        yield Lever(
            "producers",
            then.samples_per_device_hour / now.samples_per_device_hour,
            f"{split.gain:.2f} times the samples per second, with {then.producers} instead of {now.producers}",
            f"`headrace scale producer {then.producers}`",
        )


def _devices(
    rates: Rates, path: Sequence[Segment], spent: Mapping[Kind, float], bottleneck: Bottleneck
) -> Iterator[Lever]:
    queued = sum(s.seconds for s in path if s.phase in QUEUED)
    decoding = sum(s.seconds for s in path if s.phase == "decode")
    if queued > 0.05 * (queued + decoding) and rates.occupancy < SATURATED:
        saved = spent.get("generation", 0.0) * (1 - rates.occupancy)
        yield Lever(
            "refill",
            rates.period_s / max(rates.period_s - saved, rates.trainer_s, rates.scoring_s, 1e-9),
            f"tasks wait while only {rates.occupancy:.0%} of the decode slots are full",
            "more producer.slots, or a smaller trainer.group_size, so that a whole group finds room sooner",
        )
    together = rates.trainer_s + rates.generation_s
    if bottleneck.name in TAKES_TURNS and sum(rates.devices) > 1 and together > 0:
        yield Lever(
            "placement",
            rates.period_s * sum(rates.devices) / max(together, rates.scoring_s),
            f"one device that takes turns would need {together:.2f} s for a step and never wait; "
            f"{sum(rates.devices)} need {rates.period_s:.2f} s",
            'run.placement = "colocated"',
        )
    part = "training" if spent.get("training", 0.0) > spent.get("generation", 0.0) else "generation"
    yield Lever(
        "kernels",
        kernel_gain(rates, spent),
        f"{part} in half of its time",
        "profile the phase that stands on the critical path most",
    )


def kernel_gain(rates: Rates, spent: Mapping[Kind, float]) -> float:
    """What kernels twice as fast in the part that stands on the path longer would gain. `spent` is for one step."""
    generating = rates.generation_s / rates.producers if rates.producers else 0.0
    training, generation = spent.get("training", 0.0), spent.get("generation", 0.0)
    if training > generation:
        bound = max(0.5 * rates.training_s + rates.checkpoint_s, rates.scoring_s, generating)
    else:
        bound = max(rates.trainer_s, rates.scoring_s, 0.5 * generating)
    return max(1.0, rates.period_s / max(rates.period_s - 0.5 * max(training, generation), bound, 1e-9))


def _others(rates: Rates, kind: Kind) -> float:
    """What a step takes at least once a kind is gone from its path."""
    generation = rates.generation_s / rates.producers if rates.producers else 0.0
    scoring = 0.0 if kind == "scoring" else rates.scoring_s
    trainer = rates.training_s if kind == "checkpoint" else rates.trainer_s
    return max(trainer, scoring, generation)


def signs_of(run: Run, figures: Figures, rates: Rates, spent: Mapping[Kind, float]) -> list[Sign]:
    """Five signs that the ceiling is the system's, not the kernels': where they are seen, restructure first."""
    total = sum(spent.values()) or 1.0
    idle = {stage: share for stage, share in figures.idle_wait.items() if stage in ("generation", "training")}
    worst = max(idle, key=lambda stage: idle[stage], default="")
    synchronising = (spent.get("weight_sync", 0.0) + spent.get("checkpoint", 0.0) + spent.get("broker", 0.0)) / total
    speed_up = kernel_gain(rates, {kind: seconds / max(1, figures.steps) for kind, seconds in spent.items()})
    return [
        _below_peak(uses(run.intensity)),
        Sign(
            "a large share of waiting",
            idle[worst] > 0.2 if worst else None,
            f"{worst} waited {idle[worst]:.0%} of its time" if worst else "no lane was recorded",
        ),
        Sign(
            "time in synchronisation and transfer",
            synchronising > 0.1,
            f"{synchronising:.0%} of the critical path is weights, checkpoints and hand-overs",
        ),
        Sign(
            "faster kernels do not reach the wall clock",
            speed_up < 1.3,
            f"kernels twice as fast in the slower part would make the run {speed_up:.2f} times as fast",
        ),
        _scaling(run),
    ]


def _below_peak(found: Sequence[Use]) -> Sign:
    name = "utilisation well below the sustained peak"
    best = {use.phase: use.of_peak for use in found if use.of_peak is not None}
    if not best:
        return Sign(name, None, "no device was measured beside what it did")
    shown = ", ".join(f"{phase} {share:.0%}" for phase, share in best.items())
    return Sign(name, min(best.values()) < 0.5, f"of the measured roofline: {shown}")


def _scaling(run: Run) -> Sign:
    """Steps by how many producers there were: whether twice as many made it twice as fast."""
    name = "scaling that is not proportional"
    lanes = [lane for lane in run.of("producer") if lane.pieces]
    paces: dict[int, list[float]] = {}
    for before, after in zip(run.steps, run.steps[1:], strict=False):
        there = sum(lane.pieces[0].begin < before.end and lane.pieces[-1].end > after.end for lane in lanes)
        paces.setdefault(there, []).append(after.end - before.end)
    known = {count: sum(each) / len(each) for count, each in paces.items() if count and len(each) >= 3}
    if len(known) < 2:
        return Sign(name, None, "the run had one number of producers; scale it while it runs, or compare two runs")
    few, many = min(known), max(known)
    efficiency = known[few] / known[many] / (many / few)
    told = f"{many} producers instead of {few} made steps {known[few] / known[many]:.2f} times as fast"
    return Sign(name, efficiency < 0.8, told)
