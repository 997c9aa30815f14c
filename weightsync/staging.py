"""Decisions of a receiver while it stages a version. All are pure."""

from __future__ import annotations

from broker.api import Versions
from headrace.version import PolicyVersion

ROUND_CHUNKS = 16
"""Between two rounds of this many chunks the receiver looks whether a newer version is there."""
NEARLY_DONE = 0.5
"""From this staged share on, a version is finished although a newer one is sealed."""
FIRST_BACKOFF_S = 0.05
LAST_BACKOFF_S = 5.0


def next_version(seen: Versions, current: PolicyVersion | None, failed: PolicyVersion | None) -> PolicyVersion | None:
    """What to stage next: the head where it is not here yet, else what comes, which may never be sealed.

    Nothing up to what `failed` just now: its time has to come first.
    """
    floor = max((version for version in (current, failed) if version is not None), default=None)
    for version in (seen.head, seen.coming):
        if version is not None and (floor is None or version > floor):
            return version
    return None


def gives_way(staging: PolicyVersion, newest: PolicyVersion | None, staged: float, skips: int) -> bool:
    """Whether to drop what is being staged, of which this share is there, for the newest version.

    At most one version in a row is dropped (`skips` counts them): a trainer that publishes faster than this host
    stages would otherwise keep the engine on its old version for ever.
    """
    if newest is None or newest <= staging or skips > 0:
        return False
    return staged < NEARLY_DONE


def given_up(version: PolicyVersion, versions: Versions) -> bool:
    """Whether a version that was begun will never be sealed: a newer one was begun before it was the head."""
    newer = versions.coming is not None and versions.coming > version
    return newer and (versions.head is None or versions.head < version)


def backoff_s(failures: int) -> float:
    """Seconds to wait after that many failures in a row for a newer version, before trying again."""
    return 0.0 if failures <= 0 else min(LAST_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(failures - 1, 30))
