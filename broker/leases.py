"""What becomes of a task at its delivery: decided without asking anybody. Both brokers act on the answer."""

from __future__ import annotations

import re
from dataclasses import dataclass

from broker.codec import decode_task
from broker.messages import Group, TaskDelivery
from headrace.errors import WireError

_COUNT = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True, slots=True)
class Taken:
    """A task entry as the broker delivered it."""

    entry_id: str
    attempts_before: str
    """Attempts that earlier entries of this task had, as it stands in the entry."""
    deliveries: int
    """How often this entry was delivered, this time included."""
    task_id: str
    kind: str
    body: bytes


@dataclass(frozen=True, slots=True)
class Poison:
    """Goes to `dead` with this reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class Expired:
    """Fails by rule with this group."""

    delivery: TaskDelivery
    group: Group


def judge(taken: Taken, producer: str, max_deliveries: int, now_ms: float) -> TaskDelivery | Poison | Expired:
    """A task to play, or why it is not played. `now_ms` is on the broker's clock."""
    try:
        task = decode_task(taken.body)
    except WireError as error:
        return Poison(str(error))
    before = counted(taken.attempts_before)
    if (task.task_id, task.kind) != (taken.task_id, taken.kind) or before is None:
        return Poison("the entry's fields and its body name different tasks")
    if taken.deliveries > max_deliveries:
        return Poison(f"delivered {max_deliveries} times, finished by nobody")
    delivery = TaskDelivery(taken.entry_id, before + taken.deliveries, task)
    if now_ms <= task.deadline_ms:
        return delivery
    group = Group(
        task_id=task.task_id,
        attempt=delivery.attempt,
        kind=task.kind,
        environment=task.environment,
        index=task.index,
        producer=producer,
        trajectories=(),
        outcome="failed",
        error="the deadline passed before a producer had a free slot",
    )
    return Expired(delivery, group)


def counted(field: str) -> int | None:
    """A count of attempts as the broker's scripts read it from an entry's field; None for anything else."""
    return int(field) if _COUNT.fullmatch(field) else None
