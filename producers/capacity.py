"""How many tasks a producer takes: enough that no slot waits for one, and no more than it can hold."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Capacity:
    """Bounds of one producer.

    A task is `group_size` rollouts. With one group queued beyond the slots, a slot that frees is refilled from the
    engine's own queue while the next task is fetched. A group that is decoded but not yet scored and published
    needs no slot, but memory: the tasks held at once are bounded by `most_held`.
    """

    slots: int
    group_size: int

    @property
    def most_held(self) -> int:
        """Twice what decodes at once: as many groups may wait for their scores or for the broker as are decoded."""
        return 2 * (-(-self.slots // self.group_size) + 1)

    def tasks_to_take(self, playing: int, held: int) -> int:
        """Tasks to ask for with `playing` rollouts not yet decoded and `held` tasks not yet published.

        After they are taken, playing < slots + 2 * group_size when all tasks have the usual size: a whole number of
        groups is taken while at most `slots` rollouts play.
        """
        free = self.slots + self.group_size - playing
        return max(0, min(free // self.group_size, self.most_held - held))
