"""The backlog of scores: while one environment's is long, its tasks are held back, so that others' go on. Pure.

In a run with several environments, one is behind when `Capacity.most_unscored` of its groups are decoded and wait for
scores. From then on its tasks are held back before they begin, in the order in which they came, until fewer than that
are in play. Unscored groups count against that bound alone, so they take no place of other environments; all that is
held counts against `Capacity.most_held`. A single environment is in nobody's way: there the unscored count as decoded.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from headrace.version import PolicyVersion
from producers.capacity import Capacity
from producers.holding import Held


@dataclass(slots=True)
class Load:
    """Groups of one environment that a producer holds."""

    playing: int = 0
    """Of which a member still plays."""
    unscored: int = 0
    """Decoded, with a member that waits for its score."""
    scored: int = 0
    """These wait for the broker alone."""
    held_back: int = 0
    """These have not begun, because the environment is behind."""


Loads = dict[str, Load]
"""By environment, of those that have a group here."""


def loads_of(held: Collection[Held]) -> Loads:
    """What was lost is not counted."""
    loads: Loads = {}
    for task in held:
        if task.lost:
            continue
        load = loads.setdefault(task.delivery.task.environment, Load())
        load.held_back += task.held_back
        load.playing += bool(task.in_play.playing) and not task.held_back
        load.unscored += not task.in_play.playing and bool(task.in_play.scoring)
        load.scored += not task.in_play.playing and not task.in_play.scoring
    return loads


def flows(loads: Loads, capacity: Capacity) -> bool:
    """Whether some environment is here that is not behind."""
    return any(not load.held_back and load.unscored < capacity.most_unscored for load in loads.values())


def must_hold_back(environment: str, loads: Loads, capacity: Capacity) -> bool:
    """Whether a task that is about to begin is held back first."""
    load = loads.get(environment, Load())
    return capacity.environments > 1 and (load.held_back > 0 or load.unscored >= capacity.most_unscored)


def to_begin(held: Collection[Held], capacity: Capacity) -> list[Held]:
    """Of the tasks that are held back, those that begin now, in the order in which they came."""
    if not any(task.held_back for task in held):
        return []
    loads, begun = loads_of(held), list[Held]()
    for task in held:
        if not task.held_back or task.lost:
            continue
        load = loads[task.delivery.task.environment]
        if load.playing + load.unscored < capacity.most_unscored:
            load.playing += 1
            begun.append(task)
    return begun


def room(held: Collection[Held], version: PolicyVersion | None, capacity: Capacity) -> int:
    """Tasks to take now: none before a version is there, nor while a task waits for a newer one.

    A lost task takes no room, so that it can come again: for that moment, twice as many may be held.
    """
    if version is None or any(task.waits_for_version for task in held):
        return 0
    loads = loads_of(held).values()
    playing = sum(task.in_play.playing for task in held if not task.lost and not task.held_back)
    decoded = sum(load.scored + (load.unscored if capacity.environments == 1 else 0) for load in loads)
    count = sum(not task.lost for task in held)
    return min(capacity.tasks_to_take(playing, decoded), max(0, capacity.most_held - count))
