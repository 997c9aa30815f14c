"""What an operator sees of a run's streams: how much lies there, what is oldest, and what nobody could use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """An entry that nobody could use, as stream `dead` keeps it."""

    letter_id: str
    source: Literal["tasks", "groups"]
    task_id: str
    attempt: str
    kind: str
    reason: str
    sha256: str
    """Of the whole body."""
    length: int
    """Of the whole body, in bytes."""
    body: bytes
    """At most `bounds.MAX_DEAD_BYTES` of it; empty where only the list was asked for."""


@dataclass(frozen=True, slots=True)
class QueueDepths:
    tasks_waiting: int
    """Admitted and not yet taken by a producer."""
    tasks_held: int
    """Taken and not yet published."""
    groups_waiting: int
    groups_held: int
    """Delivered to the trainer, not yet acknowledged."""
    dead: int


@dataclass(frozen=True, slots=True)
class OpenTask:
    """A task that has no group yet."""

    task_id: str
    kind: str
    admitted_ms: int
    """On the broker's clock."""
    holder: str
    """The producer that has it; empty while none does."""
    deliveries: int
    """How often it was handed out, by the entry that it has now."""
