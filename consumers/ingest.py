"""Ingest: what becomes of a group that arrives. Pure; the intake settles what is judged here."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping

import numpy as np

from broker.messages import Group, GroupDelivery, StepEntry, Task, Verdict
from consumers.advantages.rewards import equal

MAX_REASON = 200
"""Characters of a reason that are kept: reasons are counted by text in the balance sheet."""


class SeenTasks:
    """Which train tasks had a group here: those whose group is held, and the verdicts of the last `capacity` others.

    The broker hands out one group per task, but a Redis that lost its newest writes has forgotten which of them were
    settled. A second group of a task is then as late as those writes were, while a capacity of several times what is
    outstanding or unsettled reaches back much further. What is held is bounded by admission and by `retain_bytes`.
    """

    def __init__(self, capacity: int, judged: Mapping[str, Verdict] | None = None) -> None:
        self.capacity = capacity
        self._held: set[str] = set()
        self._judged: OrderedDict[str, Verdict] = OrderedDict()
        for task_id, verdict in (judged or {}).items():
            self.judge(task_id, verdict)

    def __contains__(self, task_id: str) -> bool:
        return task_id in self._held or task_id in self._judged

    def holds(self, task_id: str) -> bool:
        """Its group waits for a batch, or is in one that no durable checkpoint contains."""
        return task_id in self._held

    def verdict(self, task_id: str) -> Verdict | None:
        return self._judged.get(task_id)

    def hold(self, task_id: str) -> None:
        self._held.add(task_id)

    def judge(self, task_id: str, verdict: Verdict) -> None:
        """A task has its one verdict, and keeps it."""
        self._held.discard(task_id)
        self._judged.setdefault(task_id, verdict)
        if len(self._judged) > self.capacity:
            self._judged.popitem(last=False)

    def with_trained(self, task_ids: Iterable[str]) -> dict[str, Verdict]:
        """The verdicts, oldest first, once these are trained: what a checkpoint keeps that contains their steps."""
        return {**self._judged, **dict.fromkeys(task_ids, "trained")}


def judge(group: Group) -> tuple[Verdict, str] | None:
    """The verdict and its reason for a train group that no batch will use; None for one that may be used."""
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


def has_signal(group: Group) -> bool:
    """Whether its rewards, as the environment gave them, prefer any member."""
    return not equal(np.array([trajectory.reward for trajectory in group.trajectories]))


def failed(task: Task, reason: str) -> Group:
    """What stands for the group of a task that has none."""
    return Group(
        task_id=task.task_id,
        attempt=0,
        kind=task.kind,
        environment=task.environment,
        index=task.index,
        producer="",
        trajectories=(),
        outcome="failed",
        error=reason,
    )


def entry(delivery: GroupDelivery, verdict: Verdict, reason: str = "") -> StepEntry:
    return StepEntry(delivery.entry_id, delivery.group.task_id, verdict, reason)
