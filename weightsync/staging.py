"""Decisions of a receiver while it stages a version. All are pure."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.version import PolicyVersion
from weightsync.transports.api import Range

ROUND_BYTES = 64 << 20
"""Between two rounds of this many bytes the receiver looks whether a newer version is there."""
NEARLY_DONE = 0.5
"""From this staged share on, a version is finished although a newer one is sealed."""
FIRST_BACKOFF_S = 0.05
LAST_BACKOFF_S = 5.0


def rounds(nbytes: int, round_bytes: int = ROUND_BYTES) -> Iterator[Range]:
    """Consecutive ranges that cover `nbytes`."""
    for start in range(0, nbytes, round_bytes):
        yield start, min(start + round_bytes, nbytes)


def gives_way(staging: PolicyVersion, newest: PolicyVersion | None, staged: int, nbytes: int, skips: int) -> bool:
    """Whether to drop what is being staged for the newest version.

    At most one version in a row is dropped (`skips` counts them): a trainer that publishes faster than this host
    stages would otherwise keep the engine on its old version for ever.
    """
    if newest is None or newest <= staging or skips > 0:
        return False
    return staged < NEARLY_DONE * nbytes


def backoff_s(failures: int) -> float:
    """Seconds to wait after that many failures in a row for a newer version, before trying again."""
    return 0.0 if failures <= 0 else min(LAST_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(failures - 1, 30))
