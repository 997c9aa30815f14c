"""Whether the broker answers the launcher: an account of its own calls, which is all that it can know. No waits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

NOTICED_S = 2.0
"""A call that has no answer after so long is an outage; shorter ones are nobody's business."""
TOLD_S = 30.0
"""An outage that goes on is told again after so long."""


class Outage:
    """One launcher's view of its broker."""

    def __init__(self, connect_timeout_s: float, outage_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`outage_s` is how long services wait for a broker that they have reached once."""
        # Whatever a service gives up for at its first contact has been noticed here before.
        self._noticed_s = min(NOTICED_S, connect_timeout_s / 2)
        self._outage_s = outage_s
        self._clock = clock
        self._asked: float | None = None
        """Since when a call has had no answer; only one is under way at a time."""
        self._told = 0.0
        """When this outage was told last; 0 for one that is not told yet."""
        self.why = ""
        """What the broker's client says keeps calls waiting; empty when it does not know, or nothing does."""
        self._last = float("-inf")
        """When the broker was last known to be away."""
        self.answers = asyncio.Event()
        """Cleared while the broker is away: what is started then would only give up again."""
        self.answers.set()

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Around one call to the broker that answers at once when it is there."""
        self._asked = self._clock()
        try:
            yield
            self.answers.set()
        finally:
            if self.seconds:
                self._last = self._clock()
            self._asked = None

    @property
    def seconds(self) -> float:
        """How long the broker has been away; 0 when it is there."""
        waited = 0.0 if self._asked is None else self._clock() - self._asked
        return waited if waited >= self._noticed_s else 0.0

    def heard(self, why: str) -> None:
        """Why calls wait, or "" once none does: said by the broker's client."""
        self.why = why

    def emptied(self) -> None:
        """It has lost the run: whoever asked for that was refused as where it is away."""
        self._last = self._clock()

    def was_since(self, then: float) -> bool:
        """Whether it was away at some time after `then`, on the monotonic clock."""
        return bool(self.seconds) or self._last >= then

    def news(self) -> tuple[str, str] | None:
        """An event and its text when there is something to tell that was not told yet."""
        now, seconds = self._clock(), self.seconds
        if seconds:
            self.answers.clear()
        if seconds and (not self._told or now - self._told >= TOLD_S):
            self._told = now
            why = f"{self.why}, " if self.why else "no answer "
            lasted = f"{seconds:.0f}" if seconds >= 1 else f"{seconds:.1g}"
            return "away", f"{why}for {lasted} s; everybody waits for it, {self._outage_s:g} s at most"
        if not seconds and self._told:
            self._told = 0.0
            return "back", "it answers again"
        return None
