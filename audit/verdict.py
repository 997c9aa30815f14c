"""What holds a run up, named from the critical path and the measured rates. Pure."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from audit.figures import Figures
from audit.path import Kind, Segment
from audit.rates import Rates
from audit.records import Run
from audit.split import Split

Name = Literal[
    "reward",
    "straggler",
    "weight_sync",
    "checkpoint",
    "staleness_bound",
    "too_few_producers",
    "too_many_producers",
    "trainer",
    "device",
    "unknown",
]
SATURATED = 0.85
"""Share of its time from which on a part can do hardly more."""
QUEUED = ("wait_slot", "wait_producer")
"""Phases of the path in which a task is ready and finds no room."""
SLOW = 0.5
"""Of the others' rate: a producer below it is a straggler."""


@dataclass(frozen=True, slots=True)
class Bottleneck:
    name: Name
    sentence: str
    evidence: tuple[str, ...]
    subject: str = ""
    """The service that it is about, where it is about one."""


def bottleneck_of(
    run: Run, figures: Figures, rates: Rates, split: Split | None, path: Sequence[Segment], spent: Mapping[Kind, float]
) -> Bottleneck:
    """The one thing that makes the run as long as it is. `spent` is the path's seconds by kind."""
    total = sum(spent.values())
    if not total or not run.steps:
        return Bottleneck("unknown", "no step was made, so that nothing can be said of what holds it up", ())
    evidence = (_composition(spent, total), *_idle_sentences(figures))
    training = rates.trainer_s / rates.period_s
    generation = rates.generation_s / rates.producers / rates.period_s if rates.producers else 0.0
    if rates.in_turns and training + generation >= SATURATED:
        told = f"of each step of {rates.period_s:.2f} s it trained {training:.0%} and generated {generation:.0%}"
        return Bottleneck("device", "the one device that the stages take turns on is used up", (*evidence, told))
    if training >= SATURATED:
        # However much stands on the path beside it: nothing else could make it much faster.
        if rates.checkpoint_s > rates.training_s:
            return _outside("checkpoint", figures, rates, evidence, rates.checkpoint_s / rates.period_s)
        return _trainer_bound(rates, split, evidence, training)
    top = max(spent, key=lambda kind: spent[kind])
    if top in ("scoring", "weight_sync", "checkpoint"):
        return _outside(top, figures, rates, evidence, spent[top] / total)
    if slow := straggler(rates):
        return _slow_producer(slow, rates, path, evidence)
    if generation >= SATURATED or _queued(path) > 0.5:
        return _few(rates, split, path, evidence, generation)
    return _bound(run, evidence, training, generation)


def straggler(rates: Rates) -> str:
    """The slowest producer, where it makes less than half of what the others make; empty where none is so slow."""
    if len(rates.tokens_per_s) < 2:
        return ""
    slowest = min(rates.tokens_per_s, key=lambda name: rates.tokens_per_s[name])
    others = [rate for name, rate in rates.tokens_per_s.items() if name != slowest]
    return slowest if rates.tokens_per_s[slowest] < SLOW * statistics.median(others) else ""


def _composition(spent: Mapping[Kind, float], total: float) -> str:
    parts = sorted(spent.items(), key=lambda item: -item[1])
    shown = ", ".join(
        f"{kind.replace('_', ' ')} {seconds / total:.0%}" for kind, seconds in parts if seconds > 0.005 * total
    )
    return f"of {total:.1f} s from the first batch to the last step, the critical path spent: {shown}"


def _idle_sentences(figures: Figures) -> list[str]:
    found = []
    for stage, share in figures.idle_wait.items():
        if stage not in ("generation", "training"):
            continue
        reasons = sorted(figures.idle_by_reason.get(stage, {}).items(), key=lambda item: -item[1])
        why = ", ".join(f"{reason.replace('_', ' ')} {part:.0%}" for reason, part in reasons if part >= 0.005)
        found.append(f"{stage} waited {share:.0%} of its time" + (f" ({why})" if why else ""))
    return found


def _outside(top: Kind, figures: Figures, rates: Rates, evidence: tuple[str, ...], share: float) -> Bottleneck:
    if top == "scoring":
        told = f"scoring processes worked {rates.scoring_s:.2f} s for each step of {rates.period_s:.2f} s"
        return Bottleneck("reward", f"the reward holds the run up: {share:.0%} of its time", (*evidence, told))
    if top == "checkpoint":
        told = f"a step's share of checkpoints is {rates.checkpoint_s:.2f} s of {rates.period_s:.2f} s"
        return Bottleneck("checkpoint", f"checkpoints hold the run up: {share:.0%} of its time", (*evidence, told))
    latency = figures.sync_latency_s
    told = f"from the seal of a version to its first token {latency.median:.2f} s, median" if latency else ""
    evidence = (*evidence, told) if told else evidence
    return Bottleneck(
        "weight_sync", f"bringing weights to the producers holds the run up: {share:.0%} of its time", evidence
    )


def _trainer_bound(rates: Rates, split: Split | None, evidence: tuple[str, ...], training: float) -> Bottleneck:
    told = f"the trainer worked {training:.0%} of its time"
    here = round(rates.producers)
    if split is not None and split.recommended.producers < here:
        wanted = split.recommended.producers
        sentence = f"the trainer is the slower part, and {wanted} of {here} producers would keep it busy"
        pace = (
            f"{here} producers can make a step's tokens in {rates.generation_s / here:.2f} s, "
            f"for which the trainer takes {rates.trainer_s:.2f} s"
        )
        return Bottleneck("too_many_producers", sentence, (*evidence, told, pace), "trainer")
    return Bottleneck("trainer", "the trainer is the slower part, and it never waits", (*evidence, told), "trainer")


def _slow_producer(slow: str, rates: Rates, path: Sequence[Segment], evidence: tuple[str, ...]) -> Bottleneck:
    others = statistics.median(rate for name, rate in rates.tokens_per_s.items() if name != slow)
    on_path: dict[str, float] = defaultdict(float)
    for segment in path:
        if segment.kind == "generation":
            on_path[segment.service] += segment.seconds
    waited = on_path[slow]
    told = f"{slow} makes {rates.tokens_per_s[slow]:.0f} tokens/s with all slots full, the others {others:.0f}"
    seen = f"for {waited:.1f} s of the critical path the run waited for {slow}"
    return Bottleneck("straggler", f"{slow} is much slower than the other producers", (*evidence, told, seen), slow)


def _queued(path: Sequence[Segment]) -> float:
    """Of the path's generation, the share in which a task waited for a producer or a slot: they had no room for it."""
    generation = [segment for segment in path if segment.kind == "generation"]
    total = sum(segment.seconds for segment in generation)
    return sum(s.seconds for s in generation if s.phase in QUEUED) / total if total else 0.0


def _few(
    rates: Rates, split: Split | None, path: Sequence[Segment], evidence: tuple[str, ...], generation: float
) -> Bottleneck:
    here = round(rates.producers)
    trainer = rates.trainer_s / rates.period_s
    told = f"producers were used to {generation:.0%} of what they can make, the trainer to {trainer:.0%}"
    queued = f"of generation's part of the critical path, tasks waited {_queued(path):.0%} for a producer or a slot"
    wanted = f"; the measured rates call for {split.recommended.producers}" if split else ""
    sentence = f"generation is the slower part: {here} producer{'s' * (here != 1)} cannot keep the trainer busy{wanted}"
    return Bottleneck("too_few_producers", sentence, (*evidence, told, queued))


def _bound(run: Run, evidence: tuple[str, ...], training: float, generation: float) -> Bottleneck:
    told = f"neither part is used up (trainer {training:.0%}, producers {generation:.0%}): each waits for the other"
    sentence = f"too little is under way: with staleness.max_lag = {run.max_lag} the stages take turns"
    return Bottleneck("staleness_bound", sentence, (*evidence, told))
