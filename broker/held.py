"""What a trainer was given and has not settled, and what that means for what it reads next. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from broker.bounds import KEEP_SETTLED
from broker.validate import MAX_GROUP_BYTES


@dataclass(slots=True)
class Held:
    """At most the outstanding groups, since each is the one group of its task."""

    tasks: dict[str, str] = field(default_factory=dict)
    """Entry id to task id, of what was handed out."""
    entries: dict[str, str] = field(default_factory=dict)
    """Task id to entry id: the reverse."""
    stand_ins: dict[str, str] = field(default_factory=dict)
    """Task id to a second entry of it, which Redis has instead of the one that was handed out."""
    nbytes: int = 0
    """Of all bodies that were handed out and not settled, and of the newest that were settled: Redis still has both."""
    _sizes: dict[str, int] = field(default_factory=dict)
    _readable: deque[int] = field(default_factory=deque)

    def add(self, entry_id: str, task_id: str, nbytes: int) -> None:
        """This one is handed out. A second one of its task stands in for the first, by which the task is settled."""
        if self.entries.setdefault(task_id, entry_id) != entry_id:
            self.stand_in(entry_id, task_id)
        elif entry_id not in self.tasks:
            self.tasks[entry_id] = task_id
            self._sizes[entry_id] = nbytes
            self.nbytes += nbytes

    def stand_in(self, entry_id: str, task_id: str) -> None:
        self.stand_ins[task_id] = entry_id

    def settle(self, entry_id: str, task_id: str) -> bool:
        """This one is settled; its body stays readable until `KEEP_SETTLED` later ones are. Whether one stood in."""
        if self.tasks.pop(entry_id, None) is None:
            return False
        self.entries.pop(task_id, None)
        stood_in = self.stand_ins.pop(task_id, None) is not None
        self._readable.append(self._sizes.pop(entry_id))
        while len(self._readable) > KEEP_SETTLED:
            self.nbytes -= self._readable.popleft()
        return stood_in

    def has_stand_in(self, task_id: str) -> bool:
        return task_id in self.stand_ins

    def clear(self) -> None:
        for kept in (self.tasks, self.entries, self.stand_ins, self._sizes, self._readable):
            kept.clear()
        self.nbytes = 0

    def knows(self, entry_id: str) -> bool:
        return entry_id in self.tasks or entry_id in self.stand_ins.values()

    def ids(self) -> Iterable[str]:
        """Of all entries that need not be delivered again."""
        return (*self.tasks, *self.stand_ins.values())


def fitting(count: int, number: int, nbytes: int) -> int:
    """How many entries to read at once, of `number` with `nbytes` together, so that few of them fill the memory.

    An entry may have up to 512 MB in Redis; one that is read alone is the most that a foreign one costs.
    """
    average = max(0, nbytes) // max(1, number)
    return max(1, min(count, MAX_GROUP_BYTES // max(1, average)))
