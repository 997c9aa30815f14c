"""The critical path: what the run's last step waited for, and what that waited for, back to the first batch. Pure.

While the trainer works, the path is with the trainer. While it waits for groups, the path is with the group that came
last: its score, its decoding, its wait for a slot, the weights that it needed, until a producer took it; and, before
that, with the trainer, whose batch made room for its task. So each second of wall time stands on the path once, and
what stands there is what made the run as long as it was; everything beside it was hidden behind it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from audit.records import Group, Lane, Piece, Publish, Run, Step, Swap

Kind = Literal["training", "generation", "scoring", "weight_sync", "checkpoint", "broker", "other"]

LOGPROBS = {"reference_logprobs", "proximal_logprobs"}
TRAINING = frozenset(
    {"forward_backward", "gradient_sync", "optimizer", "batch_assembly", "report", "bookkeeping", *LOGPROBS}
)
WEIGHT_SYNC = frozenset({"weight_publish", "transfer", "verify", "swap", "restore"})
CHECKPOINT = frozenset({"checkpoint", "wait_checkpoint"})
FOR_GROUPS = frozenset({"wait_groups"})

_TICK = 1e-6
_TOGETHER = 0.02
"""Seconds within which two records of one event may lie apart."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of the path."""

    begin: float
    end: float
    kind: Kind
    service: str
    phase: str
    subject: str = ""
    """Task or version."""

    @property
    def seconds(self) -> float:
        return self.end - self.begin


def kind_of(phase: str) -> Kind:
    """What a phase of the trainer is, as the path sees it."""
    if phase in TRAINING:
        return "training"
    if phase in WEIGHT_SYNC:
        return "weight_sync"
    if phase == "wait_device":  # which an engine has
        return "generation"
    return "checkpoint" if phase in CHECKPOINT else "other"


def critical_path(run: Run) -> list[Segment]:
    """The path through the run's window, in order of time; the seconds of its segments sum to the window's."""
    return _Walk(run).back()


def shares(path: Sequence[Segment]) -> dict[Kind, float]:
    """Seconds of each kind."""
    found: dict[Kind, float] = defaultdict(float)
    for segment in path:
        found[segment.kind] += segment.seconds
    return dict(found)


class _Walk:
    """From the end of the window to its begin."""

    def __init__(self, run: Run) -> None:
        self._begin, self._now = run.window
        self._trainer = _trainer(run.trainer)
        self._begins = [piece.begin for piece in self._trainer]
        self._steps: Sequence[Step] = run.steps
        self._formed = [step.formed for step in run.steps]
        self._groups = {group.task: group for group in run.groups}
        self._publishes: dict[str, Publish] = {publish.version: publish for publish in run.publishes}
        self._swaps: dict[str, list[Swap]] = defaultdict(list)
        for swap in sorted(run.swaps, key=lambda swap: swap.end):
            self._swaps[swap.producer].append(swap)
        self._path: list[Segment] = []

    def back(self) -> list[Segment]:
        while self._now > self._begin + _TICK:
            place = bisect_left(self._begins, self._now - _TICK) - 1
            if place < 0:
                self._to(self._begin, "other", "trainer", "start")
                continue
            piece = self._trainer[place]
            if piece.end < self._now - _TICK:
                self._to(piece.end, "other", "trainer", "lost")
            elif piece.phase not in FOR_GROUPS or not self._waited(piece):
                self._to(piece.begin, kind_of(piece.phase), "trainer", piece.phase)
        self._path.reverse()
        return self._path

    def _waited(self, piece: Piece) -> bool:
        """Go back along the group that ended the trainer's wait; False where none is known that did."""
        place = bisect_left(self._formed, piece.end - _TOGETHER)
        if place == len(self._steps):
            return False
        groups = [self._groups[task] for task in self._steps[place].tasks if task in self._groups]
        last = max(groups, key=lambda group: group.published, default=None)
        if last is None or last.published <= piece.begin or last.published > self._now + _TOGETHER:
            return False
        before = self._now
        self._along(last)
        return self._now < before

    def _along(self, group: Group) -> None:
        self._to(group.published, "broker", "broker", "hand_over", group.task)
        self._to(group.scored, "broker", group.producer, "publish", group.task)
        self._to(group.decoded, "scoring", group.producer, "score", group.task)
        self._to(group.started, "generation", group.producer, "decode", group.task)
        self._to(group.ready, "generation", group.producer, "wait_slot", group.task)
        swap = self._awaited(group)
        if swap is None:
            self._to(group.admitted, "generation", group.producer, "wait_producer", group.task)
            return
        self._to(swap.begin, "weight_sync", group.producer, "swap", swap.version)
        publish = self._publishes.get(swap.version)
        self._to(publish.end if publish else swap.sealed, "weight_sync", group.producer, "transfer", swap.version)

    def _awaited(self, group: Group) -> Swap | None:
        """The swap that a task waited for, where it waited for one: back beyond it the path is the version's."""
        if group.ready - group.taken < _TOGETHER:
            return None
        swaps = self._swaps[group.producer]
        place = bisect_left(swaps, group.ready - _TOGETHER, key=lambda swap: swap.end)
        return swaps[place] if place < len(swaps) and swaps[place].end < group.ready + _TOGETHER else None

    def _to(self, moment: float, kind: Kind, service: str, phase: str, subject: str = "") -> None:
        """Go back to a moment; what lies between now and then is this."""
        moment = max(moment, self._begin)
        if moment < self._now:
            if self._now - moment > _TICK or not self._path:
                self._path.append(Segment(moment, self._now, kind, service, phase, subject))
            self._now = moment


def _trainer(lanes: Sequence[Lane]) -> list[Piece]:
    """The pieces of all processes that were the trainer, one after another."""
    return sorted(piece for lane in lanes for piece in lane.pieces if piece.end > piece.begin)
