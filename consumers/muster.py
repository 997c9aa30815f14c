"""The muster: whether there is a producer, and for how long there has been none. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FIRST_S = 60.0
"""A run whose producers are still loading is not one whose producers are gone."""
BLIND_S = 15.0
"""Longer than this between two looks, nobody could be seen: Redis was away, or this process."""


@dataclass(slots=True)
class Muster:
    since: float
    """When a producer was there last; at first when the trainer began. On any clock, without the times of no sight."""
    looked: float
    """When it was looked last."""
    met: bool = False
    """Whether there ever was one."""
    gone: bool = False
    """Whether it was said that there is none."""

    def look(self, alive: int, now: float) -> Literal["gone", "back", ""]:
        """What is to be said now that so many are alive."""
        if now - self.looked > BLIND_S:
            self.since += now - self.looked
        self.looked = now
        if alive:
            back = self.gone
            self.since, self.met, self.gone = now, True, False
            return "back" if back else ""
        if self.gone or (not self.met and now - self.since < FIRST_S):
            return ""
        self.gone = True
        return "gone"

    @property
    def missed_s(self) -> float:
        """For how long no producer was there when it was looked last."""
        return self.looked - self.since

    def sentence(self, limit_s: float | None) -> str:
        """Why nothing arrives, and what becomes of it; without a limit the run waits."""
        what = "all producers of this run are gone" if self.met else "no producer has joined this run yet"
        way_out = "it waits for one" if limit_s is None else f"without one it ends after {limit_s:g} s"
        return f"{what}; {way_out} (`headrace scale producer N`, or `python -m producers`)"
