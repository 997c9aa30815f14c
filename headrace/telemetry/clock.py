"""The clock of what a process records: seconds since the epoch, by a clock that does not jump.

It is the host's time when this module was loaded, plus what the monotonic clock has counted since. Setting the host's
clock changes it for processes that start later only; the offsets that services write say how far it is off.
"""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path


def _ahead(clock: Callable[[], float]) -> float:
    """What a clock is ahead of `time.perf_counter`: of a few readings the one that was least interrupted."""
    readings = [(time.perf_counter(), clock(), time.perf_counter()) for _ in range(5)]
    before, theirs, after = min(readings, key=lambda reading: reading[2] - reading[0])
    return theirs - (before + after) / 2


EPOCH_S = _ahead(time.time)
"""What makes a reading of `time.perf_counter` seconds since the epoch."""


def epoch(reading: float) -> float:
    """Seconds since the epoch of a reading of `time.perf_counter`, to the microsecond."""
    return round(EPOCH_S + reading, 6)


def now() -> float:
    """Seconds since the epoch."""
    return epoch(time.perf_counter())


def process_began(pid: int | None = None) -> float:
    """When this process or another began, as a reading of `time.perf_counter`: by the operating system, to its tick
    (10 ms).

    The present where the operating system does not say, or where the process's tick is of another clock (a container
    with a time namespace of its own).
    """
    try:
        # The name of the program, in parentheses, may hold spaces.
        fields = Path(f"/proc/{pid or 'self'}/stat").read_text("ascii", errors="replace").rpartition(")")[2].split()
        began_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        began = began_s - _ahead(lambda: time.clock_gettime(time.CLOCK_BOOTTIME))
    except (OSError, ValueError, IndexError, AttributeError):
        return time.perf_counter()
    return min(began, time.perf_counter())


async def offset(now_ms: Callable[[], Awaitable[int]]) -> dict[str, float]:
    """What `now_ms`, the broker's clock, is ahead of this one, in seconds; half of the round trip is how far that may
    be off.
    """
    before = now()
    theirs = await now_ms() / 1000
    after = now()
    return {"offset_s": round(theirs - (before + after) / 2, 6), "uncertainty_s": round((after - before) / 2, 6)}
