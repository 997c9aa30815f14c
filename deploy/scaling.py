"""Orders to have more or fewer producers: what is started or drained, and when such an order is fulfilled."""

from __future__ import annotations

from dataclasses import dataclass

from deploy.supervisor import Part
from headrace.words import counted

JOIN_S = 180.0
"""A started producer that has not joined by then is reported so; the supervisor goes on with it."""


@dataclass(slots=True)
class Scaling:
    """One order under way."""

    token: str
    """The order's own mark, by which its sender knows the answer."""
    wanted: int
    started: list[Part]
    drained: list[Part]
    deadline: float
    """On the monotonic clock; what has not happened by then is reported so."""

    def answer(self, present: dict[str, Part], now: float) -> str | None:
        """What happened, in one sentence, once everything has or time is over; None before."""
        joining = [part for part in self.started if not part.joined and part.name in present]
        leaving = [part for part in self.drained if part.name in present]
        if (joining or leaving) and now < self.deadline:
            return None
        parts = []
        if joined := [part.name for part in self.started if part.joined]:
            parts.append(f"{', '.join(joined)} joined")
        if missing := [part.name for part in self.started if not part.joined]:
            parts.append(f"{', '.join(missing)} started but not joined yet")
        if gone := [part.name for part in self.drained if part.name not in present]:
            parts.append(f"{', '.join(gone)} drained and left")
        if leaving:
            parts.append(f"{', '.join(part.name for part in leaving)} still draining")
        return f"{counted(self.wanted, 'producer')}: {'; '.join(parts) or 'nothing to do'}"


def surplus(producers: list[Part], wanted: int) -> list[Part]:
    """The newest producers beyond `wanted`, newest first."""
    return producers[wanted:][::-1]
