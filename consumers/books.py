"""The trainer's books: how far it is, what it asked for, what waits, and what no checkpoint contains yet."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

from broker.messages import StepEntry
from consumers.batch import Batch, Batcher
from consumers.lag import History
from consumers.retention import Retained
from headrace.version import PolicyVersion


@dataclass(frozen=True, slots=True)
class Unsettled:
    """What is left of a batch that was trained on: its groups themselves are in the broker, should it be needed."""

    entries: tuple[StepEntry, ...]
    nbytes: int


@dataclass(slots=True)
class Books:
    """Changed on the event loop only."""

    incarnation: int
    formed: int
    """Batches formed since the run began: the step that the next batch is judged at."""
    cursor: int
    """Number of the next training prompt."""
    batcher: Batcher
    """Groups that wait for a batch."""
    checkpointed: int = 0
    """Step of the newest durable checkpoint."""
    made: int = 0
    """Newest step whose weights are made and were published, or skipped by the publisher."""
    history: History = field(default_factory=lambda: History({}))
    """The steps of all incarnations, this one's included once it has begun."""
    first: PolicyVersion = field(default_factory=lambda: PolicyVersion(0, 0))
    """The first version of this incarnation, once it has begun."""
    unsettled: deque[Unsettled] = field(default_factory=deque)
    """Steps whose groups no durable checkpoint contains; bounded by `consumers/retention.py`."""
    unsettled_groups: int = 0
    """Their groups, which the broker still counts as outstanding."""
    unsettled_bytes: int = 0
    largest: int = 0
    """Bytes of the largest group so far."""
    lost: int = 0
    """Tasks that were counted as lost, as the newest balance sheet says."""
    slots: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a slot may have become free; `admit` waits for it."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the broker's count of outstanding tasks and `unsettled` must say the same."""

    @property
    def version(self) -> PolicyVersion:
        """The version that the weights are once all formed batches are trained on."""
        return PolicyVersion(self.incarnation, self.formed)

    @property
    def retained(self) -> Retained:
        waiting = self.batcher
        return Retained(len(self.unsettled), self.unsettled_bytes, len(waiting), waiting.nbytes, self.largest)

    def begin(self, history: History) -> None:
        """All steps that can be made again are: this incarnation goes on from here."""
        self.made, self.first = self.formed, self.version
        self.history = history.begun(self.first)

    def took(self, batch: Batch) -> None:
        """A batch is formed: from now on its groups are not waited for."""
        self.formed += 1
        self.unsettled.append(Unsettled(batch.trained, batch.nbytes))
        self.unsettled_groups += len(batch.deliveries)
        self.unsettled_bytes += batch.nbytes
        self.slots.set()

    def settled(self, steps: int) -> None:
        """The broker has closed the tasks of so many of the oldest unsettled steps."""
        for _ in range(steps):
            step = self.unsettled.popleft()
            self.unsettled_groups -= len(step.entries)
            self.unsettled_bytes -= step.nbytes
        self.slots.set()
