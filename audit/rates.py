"""How fast each part of a run can be, measured while it ran: what a split of the devices is computed from. Pure.

A producer's rate is that with all of its slots full. As long as it is bound by memory, a decode step of few sequences
takes hardly less time than one of many, so a producer that found few tasks looks busy and could do much more: the time
of a step is fitted as a + b * occupancy to what the producer said at its heartbeats, and read at occupancy 1.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from audit.figures import idle_wait, merged
from audit.path import CHECKPOINT, kind_of
from audit.records import IDLE_PREFIX, LOST, Beat, Lane, Run

_SPREAD = 0.05
"""Standard deviation of occupancies from which on a slope can be told."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Per step and part, in a run's window. Seconds are of wall time, with as many devices as there were."""

    period_s: float
    """From step to step, as it was."""
    training_s: float
    """What the trainer worked for a step, without checkpoints."""
    checkpoint_s: float
    scoring_s: float
    """What each scoring process worked."""
    generation_s: float
    """What one producer of the usual rate would need for the tokens of a step, with all slots full."""
    producers: float
    """Of the usual rate: those that were there in the window, each counted by how long, and by its rate."""
    devices: tuple[int, int]
    """Producers' and trainer's; one that they share is the trainer's."""
    tokens_per_s: Mapping[str, float]
    """Producer to its rate with all slots full."""
    occupancy: float
    """Share of decode slots that were full while engines worked."""
    samples: float
    """Of a step."""
    in_turns: bool = False
    """Producers and trainer take turns on one device."""

    @property
    def trainer_s(self) -> float:
        return self.training_s + self.checkpoint_s

    def bound_s(self, producers: float | None = None) -> float:
        """The least a step can take with so many producers, however well everything overlaps."""
        count = self.producers if producers is None else producers
        if self.in_turns:
            return max(self.trainer_s + self.generation_s, self.scoring_s)
        return max(self.trainer_s, self.scoring_s, self.generation_s / count if count else 0.0)


def rates(run: Run) -> Rates:
    begin, end = run.window
    steps = max(1, len(run.steps))
    spent = merged(lane.seconds(begin, end) for lane in run.trainer)
    checkpoint = sum(seconds for phase, seconds in spent.items() if phase in CHECKPOINT)
    busy = sum(s for phase, s in spent.items() if kind_of(phase) in ("training", "weight_sync"))
    scoring = [lane.seconds(begin, end) for lane in run.lanes if lane.role == "scoring"]
    engines = [lane for lane in run.of("producer") if lane.seconds(begin, end)]
    each = {lane.service: rate for lane in engines if (rate := full_rate(run, lane.service)) > 0}
    usual = statistics.median(each.values()) if each else 0.0
    tokens = sum(group.tokens for group in run.groups if begin <= group.published <= end) / steps
    present: dict[str, float] = defaultdict(float)
    for lane in engines:
        present[lane.service] += sum(lane.seconds(begin, end).values()) / (end - begin)
    return Rates(
        period_s=(end - begin) / steps,
        training_s=busy / steps,
        checkpoint_s=checkpoint / steps,
        scoring_s=max((sum(one.values()) * (1 - idle_wait(one)) for one in scoring), default=0.0) / steps,
        generation_s=tokens / usual if usual else 0.0,
        producers=sum(share * each.get(name, usual) / usual for name, share in present.items()) if usual else 0.0,
        devices=(_devices(engine for engine in engines if not engine.shared), _devices(run.of("trainer"))),
        tokens_per_s=each,
        occupancy=_occupancy(run.beats, begin, end),
        samples=sum(step.rollouts for step in run.steps) / steps,
        in_turns=run.in_turns,
    )


def full_rate(run: Run, producer: str) -> float:
    """Tokens per second of a producer with all slots full; 0 where nothing is known of it."""
    lanes = [lane for lane in run.of("producer") if lane.service == producer]
    beats = sorted((beat for beat in run.beats if beat.producer == producer), key=lambda beat: beat.time)
    points = [point for before, after in pairwise(beats) if (point := _point(lanes, before, after))]
    if not points:
        busy = sum(_busy(lane, *run.window) for lane in lanes)
        begin, end = run.window
        tokens = sum(g.tokens for g in run.groups if g.producer == producer and begin <= g.published <= end)
        return tokens / busy if busy else 0.0
    return 1.0 / _at_full(points)


def _point(lanes: Sequence[Lane], before: Beat, after: Beat) -> tuple[float, float, float] | None:
    """Of one interval: occupancy, seconds per token and slot share, and its weight in tokens."""
    tokens = after.decoded_tokens - before.decoded_tokens
    busy = sum(_busy(lane, before.time, after.time) for lane in lanes)
    if tokens <= 0 or busy <= 0 or after.occupancy <= 0:
        return None
    # A step makes `occupancy * slots` tokens: seconds of a step over its slots.
    return after.occupancy, busy * after.occupancy / tokens, float(tokens)


def _at_full(points: Sequence[tuple[float, float, float]]) -> float:
    """Seconds of a step over its slots, at occupancy 1: weighted least squares, constant where there is no slope."""
    weight = sum(w for _, _, w in points)
    x = sum(w * x for x, _, w in points) / weight
    y = sum(w * y for _, y, w in points) / weight
    spread = sum(w * (each - x) ** 2 for each, _, w in points) / weight
    if spread < _SPREAD**2:
        return y
    slope = sum(w * (px - x) * (py - y) for px, py, w in points) / weight / spread
    return y + max(0.0, slope) * (1.0 - x)


def _busy(lane: Lane, begin: float, end: float) -> float:
    idle = (IDLE_PREFIX, LOST, "start")
    return sum(spent for phase, spent in lane.seconds(begin, end).items() if not phase.startswith(idle))


def _devices(lanes: Iterable[Lane]) -> int:
    """Of services that were there in the window, a replaced process not counted twice."""
    return sum({lane.service: max(1, lane.devices) for lane in lanes}.values())


def _occupancy(beats: Sequence[Beat], begin: float, end: float) -> float:
    """Mean over tokens; 1 where nobody said it."""
    by_producer: dict[str, list[Beat]] = defaultdict(list)
    for beat in sorted(beats, key=lambda beat: beat.time):
        by_producer[beat.producer].append(beat)
    steps = slots = 0.0
    for mine in by_producer.values():
        for before, after in pairwise(mine):
            tokens = after.decoded_tokens - before.decoded_tokens
            if begin <= after.time <= end and after.occupancy > 0 and tokens > 0:
                slots += tokens
                steps += tokens / after.occupancy
    return slots / steps if steps else 1.0
