"""Lanes and phases: what a device or host thread is doing, exactly one thing at any time.

A lane is always in one phase, so the seconds of its phases sum to its wall time by construction: entering a
phase closes the one before at the same clock reading.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

IDLE_PREFIX = "wait_"
"""Phases that begin so are idle waits; the rest of the name says for what."""


class Lane:
    """The phases of one device or thread. Entered from one thread; read from any."""

    def __init__(self, name: str, phase: str, clock: Callable[[], float] = time.perf_counter) -> None:
        self.name = name
        self._clock = clock
        self._start = self._since = clock()
        self._phase = phase
        self._seconds: dict[str, float] = {}
        # A reader between two of a writer's lines would see an interval twice, or not at all.
        self._lock = threading.Lock()

    @property
    def phase(self) -> str:
        return self._phase

    def enter(self, phase: str) -> None:
        """Close the current phase now and open another."""
        with self._lock:
            now = self._clock()
            self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + now - self._since
            self._phase, self._since = phase, now

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Enter `phase`, and go back to the one before at the end."""
        before = self._phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def seconds(self) -> dict[str, float]:
        """Seconds per phase since the lane began, the open phase included. Their sum is `wall()` of that moment."""
        with self._lock:
            now = self._clock()
            seconds = dict(self._seconds)
            seconds[self._phase] = seconds.get(self._phase, 0.0) + now - self._since
            return seconds

    def wall(self) -> float:
        return self._clock() - self._start


def idle_fraction(after: dict[str, float], before: dict[str, float] | None = None) -> float:
    """Share of waiting phases between two readings of `Lane.seconds` (or since its start); 0 for an empty interval."""
    before = before or {}
    spent = {phase: seconds - before.get(phase, 0.0) for phase, seconds in after.items()}
    total = sum(spent.values())
    idle = sum(seconds for phase, seconds in spent.items() if phase.startswith(IDLE_PREFIX))
    return idle / total if total > 0 else 0.0
