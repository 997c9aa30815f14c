"""Runs that a small simulation made: exact records of a pipeline whose bottleneck is known, without any process.

Trainer, producers, reward processes and weights behave as `docs/design.md` says, each step of theirs as long as the
test says. What real runs record is tested in `test_planted.py`.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from audit.records import Beat, Group, Lane, Piece, Publish, Run, Step, Swap

TOKENS = 100
"""Of a group."""


@dataclass(kw_only=True)
class Plan:
    steps: int = 20
    groups_per_step: int = 4
    max_lag: int = 4
    decode_s: list[float] = field(default_factory=lambda: [0.5])
    """Of a group; one for each producer."""
    room: int = 4
    """Groups that a producer decodes at once."""
    train_s: float = 0.5
    checkpoint_s: float = 0.0
    score_s: float = 0.01
    scorers: int = 4
    transfer_s: float = 0.01

    @property
    def reserve(self) -> int:
        return min(1, self.max_lag)


@dataclass
class _Task:
    name: str
    step: int
    admitted: float
    taken: float = 0.0
    ready: float = 0.0
    decoded: float = 0.0
    scored: float = 0.0


@dataclass
class _Producer:
    name: str
    decode_s: float
    version: int = -1
    playing: int = 0
    held: list[_Task] = field(default_factory=list)
    """Taken, and waiting for a version."""
    edges: list[tuple[float, int]] = field(default_factory=list)
    """When a group began (+1) or ended (-1) to be decoded."""
    waits: list[tuple[float, str]] = field(default_factory=list)


class Simulation:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._tasks: list[_Task] = []
        self._to_score: list[tuple[_Task, _Producer]] = []
        self._idle_scorers = list(range(plan.scorers))
        self._ready: list[_Task] = []
        self._admitted = 0
        self._formed = 0
        self._training = False
        self._trainer: list[Piece] = []
        self._free_since = 0.0
        self._scores: list[list[tuple[float, float]]] = [[] for _ in range(plan.scorers)]
        self.groups: list[Group] = []
        self.steps: list[Step] = []
        self.publishes: list[Publish] = []
        self.swaps: list[Swap] = []
        self._producers = [_Producer(f"producer-{n}", s) for n, s in enumerate(plan.decode_s, 1)]

    def run(self) -> Run:
        self._publish(0)
        self._admit((self.plan.max_lag + 1 - self.plan.reserve) * self.plan.groups_per_step)
        while self._events and self._formed <= self.plan.steps:
            self.now, _, happen = heapq.heappop(self._events)
            happen()
        end = self.steps[-1].end
        return Run(
            run_id="simulated",
            config={
                "staleness": {"max_lag": self.plan.max_lag},
                "trainer": {"groups_per_step": self.plan.groups_per_step},
                "producer": {"reward_workers": self.plan.scorers},
                "checkpoint": {"every": 1},
            },
            lanes=(
                self._trainer_lane(end),
                *(self._engine_lane(one, end) for one in self._producers),
                *(self._scoring_lane(number, end) for number in range(self.plan.scorers)),
            ),
            groups=tuple(group for group in self.groups if group.published <= end),
            steps=tuple(self.steps),
            publishes=tuple(self.publishes),
            swaps=tuple(swap for swap in self.swaps if swap.end <= end),
            beats=tuple(beat for one in self._producers for beat in self._beats(one, end)),
        )

    def _at(self, seconds: float, happen: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now + seconds, self._count, happen))

    def _admit(self, count: int) -> None:
        for _ in range(count):
            self._tasks.append(_Task(f"t-{self._admitted}", self._formed, self.now))
            self._admitted += 1
        self._deal()

    def _deal(self) -> None:
        """Producers take what there is room for, in turn."""
        while self._tasks:
            roomy = [one for one in self._producers if one.playing + len(one.held) < self.plan.room]
            if not roomy:
                return
            producer = min(roomy, key=lambda one: one.playing + len(one.held))
            task = self._tasks.pop(0)
            task.taken = self.now
            producer.held.append(task)
            self._begin(producer)

    def _begin(self, producer: _Producer) -> None:
        for task in [task for task in producer.held if producer.version >= task.step - self.plan.reserve]:
            producer.held.remove(task)
            task.ready = self.now
            producer.playing += 1
            producer.edges.append((self.now, 1))
            self._at(producer.decode_s, lambda task=task: self._decoded(task, producer))  # type: ignore[misc]
        producer.waits.append((self.now, "wait_behind_on_weights" if producer.held else "wait_no_task"))

    def _decoded(self, task: _Task, producer: _Producer) -> None:
        task.decoded = self.now
        producer.playing -= 1
        producer.edges.append((self.now, -1))
        producer.waits.append((self.now, "wait_behind_on_weights" if producer.held else "wait_no_task"))
        self._to_score.append((task, producer))
        self._score()
        self._deal()

    def _score(self) -> None:
        while self._to_score and self._idle_scorers:
            task, producer = self._to_score.pop(0)
            scorer = heapq.heappop(self._idle_scorers)
            self._scores[scorer].append((self.now, self.now + self.plan.score_s))
            self._at(self.plan.score_s, lambda t=task, p=producer, s=scorer: self._scored(t, p, s))  # type: ignore[misc]

    def _scored(self, task: _Task, producer: _Producer, scorer: int) -> None:
        heapq.heappush(self._idle_scorers, scorer)
        task.scored = self.now
        self.groups.append(
            Group(
                task.name, producer.name, "train", "played", task.admitted, task.taken, task.ready, task.ready,
                task.decoded, self.now, self.now, 4, TOKENS, 0.1,
            )
        )  # fmt: skip
        self._ready.append(task)
        self._score()
        self._form()

    def _form(self) -> None:
        if self._training or len(self._ready) < self.plan.groups_per_step:
            return
        batch, self._ready = self._ready[: self.plan.groups_per_step], self._ready[self.plan.groups_per_step :]
        self._training = True
        self._note("wait_groups")
        self._formed += 1
        begin = self.now
        self._at(self.plan.train_s, lambda: self._trained(begin, batch))
        self._admit(self.plan.groups_per_step)

    def _trained(self, begin: float, batch: list[_Task]) -> None:
        self._note("forward_backward")
        self._publish(self._formed)
        lags = Counter(max(0, self._formed - 1 - task.step) for task in batch)
        self.steps.append(
            Step(self._formed, f"1.{self._formed}", begin, self.now, tuple(t.name for t in batch), 4 * len(batch),
                 TOKENS * len(batch), 0.1 * self._formed, lags)
        )  # fmt: skip

        def free() -> None:
            self._note("checkpoint")
            self._training = False
            self._form()

        self._at(self.plan.checkpoint_s, free)

    def _publish(self, step: int) -> None:
        published = self.now
        self.publishes.append(Publish(f"1.{step}", published, published, 1000))
        for producer in self._producers:

            def commit(producer: _Producer = producer) -> None:
                producer.version = max(producer.version, step)
                self.swaps.append(Swap(producer.name, f"1.{step}", published, self.now, self.now, published, 1000))
                self._begin(producer)
                self._deal()

            self._at(self.plan.transfer_s, commit)

    def _note(self, phase: str) -> None:
        if self.now > self._free_since:
            self._trainer.append(Piece(self._free_since, self.now, phase))
            self._free_since = self.now

    def _trainer_lane(self, end: float) -> Lane:
        pieces = [piece._replace(end=min(piece.end, end)) for piece in self._trainer if piece.begin < end]
        return Lane("trainer", "trainer", "trainer", "device", "a", 1, tuple(pieces), 1, "cpu")

    def _engine_lane(self, producer: _Producer, end: float) -> Lane:
        """Decoding while any group is; else what the newest wait says."""
        pieces: list[Piece] = []
        edges = sorted([*producer.edges, (end, 0)])
        playing, since = 0, 0.0
        for moment, change in edges:
            if moment > end:
                break
            if moment > since:
                pieces.append(Piece(since, moment, "decode" if playing else self._wait(producer, since)))
                since = moment
            playing += change
        return Lane(producer.name, "producer", "engine", "device", "a", 2, tuple(pieces), 1, "simulated")

    def _scoring_lane(self, number: int, end: float) -> Lane:
        pieces, since = [], 0.0
        for begin, last in [*self._scores[number], (end, end)]:
            if begin > since:
                pieces.append(Piece(since, min(begin, end), "wait_rollout"))
            if begin < min(last, end):
                pieces.append(Piece(begin, min(last, end), "score"))
            since = last
        return Lane("producer-1", "scoring", f"score/sums/{number}", "host", "a", 2, tuple(pieces), 0)

    def _wait(self, producer: _Producer, moment: float) -> str:
        return next((why for since, why in reversed(producer.waits) if since <= moment), "wait_start")

    def _beats(self, producer: _Producer, end: float, every: float = 0.5) -> list[Beat]:
        spans = [(g.started, g.decoded) for g in self.groups if g.producer == producer.name]

        def played(moment: float) -> float:
            return sum(max(0.0, min(moment, last) - first) for first, last in spans)

        lane = self._engine_lane(producer, end)
        beats, moment = [], 0.0
        while moment < end:
            busy = lane.seconds(moment - every, moment).get("decode", 0.0)
            occupancy = (played(moment) - played(moment - every)) / busy / self.plan.room if busy > 1e-9 else 0.0
            tokens = round(played(moment) / producer.decode_s * TOKENS)
            beats.append(Beat(producer.name, moment, tokens, occupancy, 0.0))
            moment += every
        return beats


def simulated(**plan: object) -> Run:
    return Simulation(Plan(**plan)).run()  # type: ignore[arg-type]
