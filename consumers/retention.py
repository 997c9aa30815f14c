"""Retention: how much may lie in the broker only because no durable checkpoint contains it. Pure.

What is retained are the groups of steps that no checkpoint contains, and those that wait for a batch. A step moves
groups from the second to the first and changes nothing of the sum; only arrivals make it larger, and only what was
admitted arrives. So admission keeps the bound: it leaves room for every group that is still to come or may be asked
again. Such a group is taken for twice as large as the largest so far, but not for larger than one of full length.
"""

from __future__ import annotations

from dataclasses import dataclass

from broker.bounds import MAX_STEPS
from headrace.config import Config

EARLY = 0.75
"""A checkpoint is taken early when the next batch would bring what is retained over this part of its bound."""
MOST_STEPS = MAX_STEPS // 2
"""Steps without a checkpoint. The step log keeps twice as many, with those of a history that was given up."""
TOKEN_BYTES, GROUP_BYTES = 8, 1024
"""Of a sampled token on the wire, and of what a group and each of its rollouts have beside them: at most about that."""


@dataclass(frozen=True, slots=True)
class Retained:
    """What the trainer holds now, and what is still to come."""

    unsettled_steps: int
    unsettled_bytes: int
    waiting: int
    """Groups that wait for a batch."""
    waiting_bytes: int
    largest: int
    """Bytes of the largest group so far."""

    @property
    def nbytes(self) -> int:
        return self.unsettled_bytes + self.waiting_bytes


@dataclass(frozen=True, slots=True)
class Retention:
    bound: int
    groups_per_step: int
    full_group: int
    """Bytes of a group whose rollouts are all of full length."""

    @classmethod
    def of(cls, config: Config) -> Retention:
        rollouts = config.trainer.group_size
        full = GROUP_BYTES * (rollouts + 1) + TOKEN_BYTES * rollouts * config.model.context_length
        return cls(config.broker.retain_bytes, config.trainer.groups_per_step, full)

    def expected(self, largest: int) -> int:
        """Bytes of a group that is not there yet."""
        return max(largest, min(2 * largest or self.full_group, self.full_group))

    def room(self, now: Retained, coming: int) -> int:
        """How many tasks may be admitted, when `coming` groups are still to come.

        With nothing unsettled, always what the next batch lacks: after its step there is a checkpoint. So a group
        larger than the bound is trained on, too.
        """
        by_bytes = self._places(now) - now.waiting - coming
        needed = 0 if now.unsettled_steps else self.groups_per_step - now.waiting - coming
        return max(0, by_bytes, needed)

    def early(self, now: Retained) -> bool:
        """Whether a checkpoint is to be taken before the next step."""
        missing = max(0, self.groups_per_step - now.waiting)
        soon = now.nbytes + missing * self.expected(now.largest)
        near = soon > EARLY * self.bound or self._places(now) < self.groups_per_step
        return now.unsettled_steps > 0 and (near or now.unsettled_steps >= EARLY * MOST_STEPS)

    def _places(self, now: Retained) -> int:
        """Groups for which there is room beside what is unsettled."""
        return (self.bound - now.unsettled_bytes) // self.expected(now.largest)

    def full(self, now: Retained) -> bool:
        """Whether no step may be made before a checkpoint."""
        return now.unsettled_steps > 0 and (now.nbytes > self.bound or now.unsettled_steps >= MOST_STEPS)
