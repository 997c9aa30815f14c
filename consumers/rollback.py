"""Rollback: what was ordered, and what the trainer answers. It obeys between two steps (`consumers/course.py`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from broker.api import Order
from headrace.version import PolicyVersion

MOST = 8
"""Orders that wait, and answers that are kept: their senders read them within seconds."""
Answer = dict[str, str]
"""Either `version`, the one that has the old weights now, or `refused`, the reason."""


@dataclass(frozen=True, slots=True)
class Asked:
    version: PolicyVersion
    mark: str
    """The order's own, by which its sender knows the answer."""


class Rollbacks:
    """Changed on the event loop only."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """`wake` is called when an order came that waits."""
        self.answers: dict[str, Answer] = {}
        """For the heartbeat."""
        self._wake = wake
        self._waiting: deque[Asked] = deque()
        self._closed = ""

    def __bool__(self) -> bool:
        """Whether an order waits."""
        return bool(self._waiting)

    def order(self, order: Order) -> None:
        """One that cannot be obeyed is answered at once."""
        try:
            asked = Asked(PolicyVersion.parse(order.target), order.reason)
        except ValueError:
            self._answer(order.reason, {"refused": f"{order.target[:40]!r} is no version"})
            return
        if self._closed:
            self.refuse(asked, self._closed)
        elif len(self._waiting) >= MOST:
            self.refuse(asked, f"{MOST} rollbacks wait already")
        else:
            self._waiting.append(asked)
            self._wake()

    def next(self) -> Asked | None:
        return self._waiting.popleft() if self._waiting else None

    def refuse(self, asked: Asked, reason: str) -> None:
        self._answer(asked.mark, {"refused": reason})

    def done(self, asked: Asked, version: PolicyVersion) -> None:
        self._answer(asked.mark, {"version": str(version)})

    def close(self, reason: str) -> None:
        """No step is made any more: whoever asks is refused."""
        self._closed = reason
        while asked := self.next():
            self.refuse(asked, reason)

    def _answer(self, mark: str, answer: Answer) -> None:
        self.answers = dict([*self.answers.items(), (mark, answer)][-MOST:])
