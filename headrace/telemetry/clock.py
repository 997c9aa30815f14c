"""The clock of what a process records: seconds since the epoch, by a clock that does not jump.

It is the host's time when this module was loaded, plus what the monotonic clock has counted since. Setting the host's
clock changes it for processes that start later only; the offsets that services write say how far it is off.
"""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

EPOCH_S = time.time() - time.perf_counter()
"""What makes a reading of `time.perf_counter` seconds since the epoch."""


def epoch(reading: float) -> float:
    """Seconds since the epoch of a reading of `time.perf_counter`, to the microsecond."""
    return round(EPOCH_S + reading, 6)


def now() -> float:
    """Seconds since the epoch."""
    return epoch(time.perf_counter())


def process_began() -> float:
    """When this process began, as a reading of `time.perf_counter`: by the operating system, to its tick (10 ms).

    The present where the operating system does not say, or where the process's tick is of another clock (a container
    with a time namespace of its own).
    """
    reading = time.perf_counter()
    try:
        # The name of the program, in parentheses, may hold spaces.
        fields = Path("/proc/self/stat").read_text("ascii", errors="replace").rpartition(")")[2].split()
        ticks = int(fields[19])
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return reading
    return reading - age_s if 0 <= age_s <= reading else reading


async def offset(now_ms: Callable[[], Awaitable[int]]) -> dict[str, float]:
    """What `now_ms`, the broker's clock, is ahead of this one, in seconds; half of the round trip is how far that may
    be off.
    """
    before = now()
    theirs = await now_ms() / 1000
    after = now()
    return {"offset_s": round(theirs - (before + after) / 2, 6), "uncertainty_s": round((after - before) / 2, 6)}
