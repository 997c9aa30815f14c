"""The trainer's books: how far it is, what it asked for, and what no checkpoint contains yet."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from consumers.batch import Batch
from headrace.version import PolicyVersion

RETAINED_BYTES = 256 << 20
"""Groups that lie in the broker only because no checkpoint contains them; more of them bring one early."""


@dataclass(slots=True)
class Books:
    """Changed on the event loop only."""

    incarnation: int
    formed: int
    """Batches formed since the run began: the step that the next batch is judged at."""
    cursor: int
    """Number of the next training task."""
    first: PolicyVersion
    """The first version of this incarnation."""
    checkpointed: int
    """Step of the newest durable checkpoint."""
    unsettled: list[Batch] = field(default_factory=list)
    """Batches whose groups no durable checkpoint contains."""
    slots: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a slot may have become free; `admit` waits for it."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the broker's count of outstanding tasks and `unsettled` must say the same."""

    @property
    def version(self) -> PolicyVersion:
        """The version that the weights are once all formed batches are trained on."""
        return PolicyVersion(self.incarnation, self.formed)

    @property
    def unsettled_groups(self) -> int:
        """Groups that are in a batch, while the broker still counts them as outstanding."""
        return sum(len(batch.deliveries) for batch in self.unsettled)

    @property
    def retained_bytes(self) -> int:
        return sum(batch.nbytes for batch in self.unsettled)

    def took(self, batch: Batch) -> None:
        """A batch is formed: from now on its groups are not waited for."""
        self.formed += 1
        self.unsettled.append(batch)
        self.slots.set()

    def checkpoint_due(self, every: int) -> bool:
        return self.formed - self.checkpointed >= every or self.retained_bytes > RETAINED_BYTES
