"""The tasks that a producer holds, and what follows from them. Pure."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field

from broker.messages import Task, TaskDelivery
from headrace.version import PolicyVersion
from producers.in_play import InPlay

MOST_EARLIER = 8
"""Deliveries of one task beside the newest."""


@dataclass(slots=True, eq=False)
class Held:
    """One task of this producer, from when it is taken until it is published, given back or lost."""

    delivery: TaskDelivery
    """The newest of this task."""
    in_play: InPlay
    budget_s: float
    """Until the task's deadline, from when it was taken."""
    waits_for_version: bool
    unavailable: str = ""
    """Why an evaluation's version cannot be had here."""
    held_back: bool = False
    """Its environment's scores are behind (`producers/backlog.py`)."""
    let_in: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once a task that was held back begins."""
    publishing: bool = False
    lost: bool = False
    """The broker does not know it as this producer's: taken over by another, or about to be handed out again."""
    job: asyncio.Task[None] | None = None
    earlier: list[TaskDelivery] = field(default_factory=list)
    """Of the same task, by other entries that the broker has: which of all counts, its answer to the group says."""

    @property
    def evaluates(self) -> bool:
        return self.delivery.task.kind == "eval"

    def came_again(self, delivery: TaskDelivery) -> None:
        """By the same entry, or by another one."""
        others = [] if self.lost else [*self.earlier, self.delivery]
        self.earlier = [one for one in others if one.entry_id != delivery.entry_id][-MOST_EARLIER:]
        self.delivery, self.lost = delivery, False

    def went(self, entry_ids: Collection[str]) -> None:
        """The broker has these no more; what is left of the task's is held."""
        left = [one for one in (*self.earlier, self.delivery) if one.entry_id not in entry_ids]
        self.lost = not left
        if left:
            *self.earlier, self.delivery = left


def may_start(version: PolicyVersion | None, task: Task) -> bool:
    """A training task may start on the version that it names or a newer one, an evaluation on that one alone."""
    if version is None:
        return False
    return version == task.min_version if task.kind == "eval" else version >= task.min_version


def phase(held: Collection[Held], version: PolicyVersion | None, outage: bool = False) -> str:
    """What the producer as a whole is doing: it plays while any rollout does, also when the broker is away."""
    if version is None:
        return "wait_broker" if outage else "wait_start"
    playing = [task for task in held if task.in_play.playing and not task.held_back]
    if playing and not all(task.waits_for_version for task in playing):
        return "play"
    if playing:
        return "wait_broker" if outage else "wait_behind_on_weights"
    if any(task.in_play.scoring or task.held_back for task in held):
        return "wait_scores"
    if outage:
        return "wait_broker"
    return "wait_backpressure" if held else "wait_no_task"
