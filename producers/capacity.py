"""How many tasks a producer takes: enough that no slot waits for one, and no more than it can hold."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Capacity:
    """Bounds of one producer whose tasks are `group_size` rollouts each.

    At least one group's worth of rollouts is queued in the engine beyond its slots, so that a slot that frees is
    refilled at the same decode step, while the next task is on its way. Groups of which a member still plays are
    bounded by that: each holds a place. In a long-tailed run they are many more than the slots hold whole groups.
    """

    slots: int
    group_size: int
    environments: int = 1
    """That are trained on."""

    @property
    def most_playing(self) -> int:
        """Rollouts in slots or queued for one, when all tasks have the usual size."""
        return self.slots + 2 * self.group_size - 1

    @property
    def most_decoded(self) -> int:
        """Groups that wait for their scores or for the broker: twice what fits into the slots.

        They need no slot, but memory, and nobody trains on them: beyond this the producer waits.
        """
        return 2 * (-(-self.slots // self.group_size) + 1)

    @property
    def most_unscored(self) -> int:
        """Decoded groups of one environment that wait for scores, before its next tasks are held back.

        As many as fit into the slots, and one more: what was decoded while all of them were decoded.
        """
        return self.most_decoded // 2

    @property
    def most_held(self) -> int:
        """Tasks held at once: each has a rollout that plays, or is decoded."""
        return self.most_playing + self.most_decoded

    def tasks_to_take(self, playing: int, decoded: int) -> int:
        """Tasks to ask for with `playing` rollouts not yet decoded and `decoded` groups not yet published.

        Whole groups only, until at least `slots + group_size` rollouts play and at most `most_playing`.
        """
        if decoded >= self.most_decoded:
            return 0
        missing = self.slots + self.group_size - playing
        return max(0, -(-missing // self.group_size))
