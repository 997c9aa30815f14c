"""The tasks that a producer holds, and what follows from them. Pure."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass

from broker.messages import TaskDelivery
from headrace.version import PolicyVersion
from producers.capacity import Capacity
from producers.group import Occupancy


@dataclass(slots=True, eq=False)
class Held:
    """One task of this producer, from when it is taken until it is published, given back or lost."""

    delivery: TaskDelivery
    occupancy: Occupancy
    budget_s: float
    """Until the task's deadline, from when it was taken."""
    waits_for_version: bool
    publishing: bool = False
    job: asyncio.Task[None] | None = None


def too_old(version: PolicyVersion | None, delivery: TaskDelivery) -> bool:
    """A task may not start on a version older than it says."""
    return version is None or version < delivery.task.min_version


def room(held: Collection[Held], version: PolicyVersion | None, capacity: Capacity) -> int:
    """Tasks to take now: none before a version is there, nor while a task waits for a newer one."""
    if version is None or any(task.waits_for_version for task in held):
        return 0
    playing = [task.occupancy.playing for task in held]
    return capacity.tasks_to_take(sum(playing), playing.count(0))


def phase(held: Collection[Held], version: PolicyVersion | None) -> str:
    """What the producer as a whole is doing: it plays while any rollout does."""
    if version is None:
        return "wait_version"
    playing = [task for task in held if task.occupancy.playing]
    if playing:
        return "wait_version" if all(task.waits_for_version for task in playing) else "play"
    if any(task.occupancy.scoring for task in held):
        return "wait_score"
    return "wait_broker" if held else "wait_tasks"
