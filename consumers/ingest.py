"""Ingest: what becomes of a group that arrives. Pure; the loop settles what is judged here."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable

from broker.messages import Group, GroupDelivery, StepEntry, Verdict

MAX_REASON = 200
"""Characters of a reason that are kept: reasons are counted by text in the balance sheet."""


class SeenTasks:
    """The last `capacity` train tasks that were judged or wait for a batch: a second group of one is a duplicate.

    The broker refuses attempts that are no longer pending, so a duplicate is at most as late as a task can be
    outstanding; a capacity of several times the admission slots covers that.
    """

    def __init__(self, capacity: int, task_ids: Iterable[str] = ()) -> None:
        self.capacity = capacity
        self._ids: OrderedDict[str, None] = OrderedDict()
        for task_id in task_ids:
            self.add(task_id)

    def __contains__(self, task_id: str) -> bool:
        return task_id in self._ids

    def add(self, task_id: str) -> None:
        self._ids[task_id] = None
        if len(self._ids) > self.capacity:
            self._ids.popitem(last=False)

    def ids(self) -> list[str]:
        """Oldest first: what a checkpoint keeps."""
        return list(self._ids)


def judge(group: Group, seen: SeenTasks) -> tuple[Verdict, str] | None:
    """The verdict and its reason for a train group that no batch will use; None for one that may be used.

    Remembers the task either way.
    """
    if group.task_id in seen:
        return "superseded", "a group of this task was here before"
    seen.add(group.task_id)
    if group.outcome != "played":
        return group.outcome, group.error[:MAX_REASON]
    if not group.trajectories:
        reason = group.failures[0] if group.failures else "the group is empty"
        return "failed", reason[:MAX_REASON]
    if not all(math.isfinite(trajectory.reward) for trajectory in group.trajectories):
        return "failed", "a reward is not finite"
    if not any(trajectory.loss_mask_T.any() for trajectory in group.trajectories):
        return "filtered", "no token was sampled"
    return None


def entry(delivery: GroupDelivery, verdict: Verdict, reason: str = "") -> StepEntry:
    return StepEntry(delivery.entry_id, delivery.group.task_id, verdict, reason)
