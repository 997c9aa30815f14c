"""Admission: how many tasks may be outstanding, and what they may start on. Pure; `consumers/asking.py` asks and acts.

With G groups per step, maximum lag L and s = min(1, L) steps reserved for weights on their way, there are
`(L + 1 - s) * G` slots. A task admitted after t batches were formed may start on any version >= t - s. When it is
admitted at most `(L + 1 - s) * G - 1` tasks are before it, so in admission order it is in one of the next
`L + 1 - s` batches, which are formed at steps t … t + L - s: its oldest token is at most `(t + L - s) - (t - s) = L`
steps behind. Outstanding work is bounded by the slots at any time. The whole proof, with stale groups that are asked
again, forks and bytes, is in `docs/admission.md`.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.version import PolicyVersion


@dataclass(frozen=True, slots=True)
class Window:
    """The bounds that admission keeps."""

    groups_per_step: int
    max_lag: int
    total_steps: int

    @property
    def reserve(self) -> int:
        """Steps reserved for weights on their way (s)."""
        return min(1, self.max_lag)

    @property
    def slots(self) -> int:
        """Most tasks that are admitted and in no batch yet."""
        return (self.max_lag + 1 - self.reserve) * self.groups_per_step

    def free(self, formed: int, outstanding: int) -> int:
        """How many tasks to admit now: free slots, but no more than the remaining steps can use.

        `formed` counts the batches formed since the run began, `outstanding` the tasks that are in none and not
        judged otherwise.
        """
        remaining = (self.total_steps - formed) * self.groups_per_step
        return max(0, min(self.slots, remaining) - outstanding)

    def min_version(self, formed: int, first: PolicyVersion) -> PolicyVersion:
        """The oldest version that a task admitted now may start on; `first` is the first of this incarnation."""
        return max(PolicyVersion(first.incarnation, formed - self.reserve), first)
