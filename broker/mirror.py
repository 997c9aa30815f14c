"""What the trainer knows of its run, and what is to be done when a broker comes back with less than that. Pure.

Only the trainer changes the balance sheet, but for the operator's replays, so where both differ it is the trainer that
knows. (A Redis that was started anew has a prefix of its history, and perhaps, where its append-only file was torn
within a transaction before, the beginning of that one.) What is under way when a comparison is made may have reached
Redis or not; the rules below are right in both cases, and when the caller sends it again:

- a verdict stands in the mirror before it is sent;
- a task that is being admitted is in `asked`: it counts once Redis has it;
- a task that the operator replayed has a number; higher ones than the mirror has seen are its next news.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import get_args

from broker.api import RunStatus
from broker.bounds import MAX_REASONS
from broker.messages import Task, TaskKind


@dataclass(frozen=True, slots=True)
class Kept:
    """An outstanding task. Without a body (its group had come when this trainer began) it cannot be asked again."""

    kind: str
    body: bytes | None


@dataclass(frozen=True, slots=True)
class Opened:
    """Where Redis has a task: "t" in tasks, "g" in groups, and whether that entry is there."""

    kind: str
    where: str
    there: bool
    replay: int = 0
    """The number of its replay, where the operator asked for it: a later one has a higher number."""


@dataclass(frozen=True, slots=True)
class Found:
    """What Redis has."""

    counts: Mapping[str, int]
    open: Mapping[str, Opened]
    replays: int
    strays: Sequence[str] = ()
    """Entries of tasks that no open task names: a torn transaction left them, and what they bring counts nothing."""


@dataclass(frozen=True, slots=True)
class Repair:
    """What makes Redis whole."""

    strays: Sequence[str]
    """Entries that leave."""
    counts: dict[str, int]
    """Counters of the sheet and what they must be, before the lost ones are counted."""
    closed: list[str]
    """Tasks whose verdict Redis forgot: their entries leave."""
    held: list[tuple[str, str]]
    """Task and kind of those whose group the trainer has and Redis lost."""
    lost: list[tuple[str, Kept]]
    """Tasks that Redis forgot: counted as lost, and asked again."""
    replayed: dict[str, str]
    """Task to kind of the operator's replays that are news to the mirror."""
    replays: int
    """Number of the newest one."""
    seen: int
    """Sum of the counters that Redis had: it is another one after any change of the sheet."""

    @property
    def empty(self) -> bool:
        return not (self.strays or self.counts or self.closed or self.held or self.lost)


@dataclass(slots=True)
class Mirror:
    """As large as the sheet and what is outstanding, which admission bounds."""

    status: RunStatus = "running"
    reason: str = ""
    step: int = 0
    cursor: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    """The sheet, under the names of `broker/sheet.py`."""
    outstanding: dict[str, Kept] = field(default_factory=dict)
    asked: dict[str, Kept] = field(default_factory=dict)
    """Tasks of an admission that has no answer yet."""
    replays: int = 0
    """Number of the newest replay that is known."""

    def ask(self, tasks: Iterable[tuple[Task, bytes]]) -> None:
        for task, body in tasks:
            if task.task_id not in self.outstanding:
                self.asked[task.task_id] = Kept(task.kind, body)

    def admitted(self, tasks: Iterable[str], replayed: Container[str]) -> None:
        """The answer: these were asked for; what the operator replays was left out, and is news of its own."""
        for task_id in tasks:
            kept = self.asked.pop(task_id, None)
            if kept is not None and task_id not in replayed:
                self._add(task_id, kept)

    def close(self, task_id: str, verdict: str, reason: str) -> None:
        """A verdict that is about to be sent. A task that is not outstanding counts nothing."""
        kept = self.asked.pop(task_id, None)
        if kept is not None:
            # Its admission went through, though its answer was lost.
            self._add(task_id, kept)
        kept = self.outstanding.pop(task_id, None)
        if kept is not None:
            self.count(kept.kind, verdict, reason)

    def count(self, kind: str, verdict: str, reason: str) -> None:
        self.counts[f"{kind} v {verdict}"] += 1
        if reason:
            name = f"{kind} r {verdict}: {reason}"
            if name not in self.counts and len(self.counts) >= MAX_REASONS:
                name = f"{kind} r {verdict}: other reasons"
            self.counts[name] += 1

    def even_out(self, reason: str) -> None:
        """What a trainer that begins cannot explain is lost: Redis lost it together with the trainer before."""
        for kind in get_args(TaskKind):
            name = f"{kind} admitted"
            closed = sum(number for other, number in self.counts.items() if other.startswith(f"{kind} v "))
            left = self.counts[name] - closed - sum(kept.kind == kind for kept in self.outstanding.values())
            if left < 0:
                self.counts[name] -= left
            for _ in range(left):
                self.count(kind, "lost", reason)

    def compare(self, found: Found, held: Container[str]) -> Repair:
        """What Redis lacks. `held` are tasks whose group the trainer was given and has not settled.

        Changes the mirror only where Redis knows better: admissions without an answer.
        """
        for task_id in [task_id for task_id in self.asked if _there(found, task_id)]:
            self._add(task_id, self.asked.pop(task_id))
        known = self.outstanding
        replayed = {
            task_id: opened.kind
            for task_id, opened in found.open.items()
            if opened.replay > self.replays and task_id not in known and opened.there
        }
        vanished = [task_id for task_id in known if not _there(found, task_id)]
        return Repair(
            strays=found.strays,
            counts=self._differing(found.counts, Counter(f"{kind} admitted" for kind in replayed.values())),
            closed=[task_id for task_id in found.open if task_id not in known and task_id not in replayed],
            held=[
                (task_id, kept.kind)
                for task_id, kept in known.items()
                if task_id in held and not (_there(found, task_id) and found.open[task_id].where == "g")
            ],
            lost=[(task_id, known[task_id]) for task_id in vanished if task_id not in held],
            replayed=replayed,
            replays=max(self.replays, found.replays),
            seen=sum(found.counts.values()),
        )

    def repaired(self, repair: Repair, reason: str) -> None:
        """Redis has done all of it."""
        self.replays = repair.replays
        for task_id, kind in repair.replayed.items():
            self._add(task_id, Kept(kind, None))
        for task_id, kept in repair.lost:
            # A verdict that was given meanwhile closes the task that is asked again, where it is.
            closed = self.outstanding.pop(task_id, None) is None
            if kept.body is not None:
                self.count(kept.kind, "lost", reason)
                self.counts[f"{kept.kind} admitted"] += 1
                self.outstanding.update({} if closed else {task_id: kept})
            elif not closed:
                self.count(kept.kind, "lost", reason)

    def _add(self, task_id: str, kept: Kept) -> None:
        if task_id not in self.outstanding:
            self.outstanding[task_id] = kept
            self.counts[f"{kept.kind} admitted"] += 1

    def _differing(self, counts: Mapping[str, int], news: Mapping[str, int]) -> dict[str, int]:
        right = {name: self.counts.get(name, 0) + news.get(name, 0) for name in {*self.counts, *counts, *news}}
        return {name: number for name, number in right.items() if number != counts.get(name, 0)}


def _there(found: Found, task_id: str) -> bool:
    opened = found.open.get(task_id)
    return opened is not None and opened.there
