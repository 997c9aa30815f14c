"""Lanes and phases: what a device or host thread is doing, exactly one thing at any time.

A lane is always in one phase, so the seconds of its phases sum to its wall time by construction: entering a phase
closes the one before at the same clock reading. Readings are whole microseconds, so that sums are exact.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from headrace.telemetry.clock import EPOCH_S

IDLE_PREFIX = "wait_"
"""Phases that begin so are idle waits; the rest of the name says for what."""
MOST_SPANS = 64
"""Of one record; of more, only the sums are kept."""

Shares = tuple[tuple[str, float], ...]
"""Phases that share a time, in order, and how much of it is each one's; they sum to 1."""


@dataclass(frozen=True, slots=True)
class Cut:
    """What a lane did in one stretch of time. All times are whole microseconds of its clock."""

    begin: int
    end: int
    spans: tuple[tuple[str, int], ...] | None
    """In order, neighbours of different phases; None where there would be more than MOST_SPANS."""
    sums: dict[str, int]
    ends_in: str
    """The phase that is open at the end."""

    def then(self, later: Cut) -> Cut:
        """Both as one; `later` begins where this one ends."""
        spans: tuple[tuple[str, int], ...] | None = None
        if self.spans is not None and later.spans is not None:
            joined = list(self.spans)
            for phase, spent in later.spans:
                _append(joined, phase, spent)
            spans = tuple(joined) if len(joined) <= MOST_SPANS else None
        sums = {phase: self.sums.get(phase, 0) + later.sums.get(phase, 0) for phase in {**self.sums, **later.sums}}
        return Cut(self.begin, later.end, spans, sums, later.ends_in)


@dataclass(slots=True)
class Place:
    """Which devices a lane is of."""

    kind: str = "host"
    """"device", or "host" for what only uses the processor."""
    device: str = "cpu"
    devices: int = 0
    uuid: str = ""
    """Of an NVIDIA device."""
    shared: bool = False
    """Its device is the one of all shared lanes of its host."""
    estimated: bool = False
    """The split into phases is estimated."""


@dataclass(slots=True)
class Work:
    """What was computed in a phase, by the model's arithmetic."""

    flop: float = 0.0
    nbytes: float = 0.0


@dataclass(slots=True)
class _Stretch:
    """The time since the last cut."""

    begin: int
    spans: list[tuple[str, int]] = field(default_factory=list)
    sums: dict[str, int] = field(default_factory=dict)
    whole: bool = True
    """The spans are all there."""

    def add(self, phase: str, spent: int) -> None:
        self.sums[phase] = self.sums.get(phase, 0) + spent
        if self.whole:
            _append(self.spans, phase, spent)
            if len(self.spans) > MOST_SPANS:
                self.whole, self.spans = False, []

    def precede(self, phase: str, spent: int) -> None:
        """The stretch began so much earlier, in this phase."""
        spans = self.spans
        self.begin, self.spans = self.begin - spent, [(phase, spent)]
        self.sums[phase] = self.sums.get(phase, 0) + spent
        for span in spans:
            _append(self.spans, *span)


class Lane:
    """The phases of one device or thread. Entered by any thread, one at a time; read from any."""

    def __init__(
        self,
        name: str,
        phase: str,
        clock: Callable[[], float] = time.perf_counter,
        *,
        place: Place | None = None,
        waits_for: str = "start",
    ) -> None:
        """`waits_for`: what `wait` waits for, until `because` says something else."""
        self.name = name
        self.place = place or Place()
        self.thread = 0
        """The operating system's id of its own thread; 0 while it has none."""
        self.mark: Callable[[str], Any] | None = None
        """Is told of each phase that begins, by the thread that enters it."""
        self.work: dict[str, Work] = {}
        """What was computed since the lane began, by phase. Written by the lane's own thread alone."""
        self._clock = clock
        self._start = self._since = self._now()
        self._phase = phase
        self._shares: Shares = ()
        """Of the open phase, where it is several."""
        self._seconds: dict[str, int] = {}
        """Microseconds, of what is closed."""
        self._stretch = _Stretch(self._start)
        self._reason = waits_for
        self._waits = False
        # A reader between two of a writer's lines would see an interval twice, or not at all.
        self._lock = threading.Lock()

    @property
    def phase(self) -> str:
        return self._phase

    @property
    def began(self) -> float:
        """Seconds since the epoch."""
        return round(EPOCH_S + self._start / 1e6, 6)

    def enter(self, phase: str) -> None:
        """Close the current phase now and open another."""
        with self._lock:
            self._open(phase)
        if self.mark is not None:
            self.mark(phase)

    def enter_shared(self, shares: Sequence[tuple[str, float]]) -> None:
        """Open several phases at once: they get these shares of the time until the next one, in this order.

        The shares need not sum to 1. The lane's phase is the greatest of them.
        """
        total = sum(share for _, share in shares)
        phase = max(shares, key=lambda pair: pair[1])[0]
        with self._lock:
            self._open(phase)
            if total > 0:
                self._shares = tuple((name, share / total) for name, share in shares)
        if self.mark is not None:
            self.mark(phase)

    def wait(self) -> None:
        """Wait idly, for what `because` says."""
        with self._lock:
            phase = IDLE_PREFIX + self._reason
            self._open(phase)
            self._waits = True
        if self.mark is not None:
            self.mark(phase)

    def because(self, reason: str) -> None:
        """What `wait` waits for from now on, also where it waits already. Of any thread."""
        with self._lock:
            if reason == self._reason:
                return
            self._reason = reason
            if self._waits:
                self._open(IDLE_PREFIX + reason)
                self._waits = True

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Enter `phase`, and go back to the one before at the end."""
        before = self._phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def backdate(self, reading: float, phase: str = "start") -> None:
        """It began in this phase at an earlier reading of its clock. Before the first `cut`."""
        with self._lock:
            earlier = self._start - round(reading * 1e6)
            if earlier > 0:
                self._start -= earlier
                self._seconds[phase] = self._seconds.get(phase, 0) + earlier
                self._stretch.precede(phase, earlier)

    def bind(self) -> None:
        """The calling thread is the lane's own."""
        self.thread = threading.get_native_id()

    def did(self, phase: str, flop: float, nbytes: float) -> None:
        """So much was computed in this phase. On the lane's own thread."""
        work = self.work.get(phase)
        if work is None:
            # A reader of another thread copies the dictionary under the lock.
            with self._lock:
                work = self.work[phase] = Work()
        work.flop += flop
        work.nbytes += nbytes

    def done(self) -> dict[str, Work]:
        """What was computed so far, by phase."""
        with self._lock:
            return {phase: Work(work.flop, work.nbytes) for phase, work in self.work.items()}

    def seconds(self) -> dict[str, float]:
        """Seconds per phase since the lane began, the open phase included. Their sum is `wall()` of that moment."""
        with self._lock:
            spent = dict(self._seconds)
            for phase, part in self._parts(self._now()):
                spent[phase] = spent.get(phase, 0) + part
        return {phase: part / 1e6 for phase, part in spent.items()}

    def wall(self) -> float:
        return (self._now() - self._start) / 1e6

    def cut(self) -> Cut:
        """What it did since the last cut, or since it began; the open phase goes on."""
        with self._lock:
            self._book(self._now())
            stretch, self._stretch = self._stretch, _Stretch(self._since)
            spans = tuple(stretch.spans) if stretch.whole else None
            return Cut(stretch.begin, self._since, spans, stretch.sums, self._phase)

    def _now(self) -> int:
        return round(self._clock() * 1e6)

    def _open(self, phase: str) -> None:
        self._book(self._now())
        self._phase, self._shares, self._waits = phase, (), False

    def _book(self, now: int) -> None:
        """Count the open phase up to now."""
        for phase, spent in self._parts(now):
            self._seconds[phase] = self._seconds.get(phase, 0) + spent
            self._stretch.add(phase, spent)
        self._since = now

    def _parts(self, now: int) -> list[tuple[str, int]]:
        """The open phase's time up to now, by the phases that share it."""
        spent = now - self._since
        if not self._shares:
            return [(self._phase, spent)]
        parts, used, share = [], 0, 0.0
        for phase, its in self._shares[:-1]:
            share += its
            until = round(spent * share)
            parts.append((phase, until - used))
            used = until
        return [*parts, (self._shares[-1][0], spent - used)]


def _append(spans: list[tuple[str, int]], phase: str, spent: int) -> None:
    """Add a span; one of the same phase as the last grows it, one without a length is left out."""
    if spans and spans[-1][0] == phase:
        spans[-1] = phase, spans[-1][1] + spent
    elif spent:
        spans.append((phase, spent))


def idle_fraction(after: dict[str, float], before: dict[str, float] | None = None) -> float:
    """Share of waiting phases between two readings of `Lane.seconds` (or since its start); 0 for an empty interval."""
    before = before or {}
    spent = {phase: seconds - before.get(phase, 0.0) for phase, seconds in after.items()}
    total = sum(spent.values())
    idle = sum(seconds for phase, seconds in spent.items() if phase.startswith(IDLE_PREFIX))
    return idle / total if total > 0 else 0.0
