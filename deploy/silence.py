"""Parts that live and say nothing: their event loop is blocked, or somebody has stopped them. A pure account."""

from __future__ import annotations

from collections.abc import Iterable, Set

from deploy.supervisor import Part
from headrace.config import Config

LEASES = 12
"""A part that gave no heartbeat for so many of its leases will not give one."""
TRAINER_LEASE_S = 10.0


class Silence:
    """How long each part was not heard of, in time in which others could have been."""

    def __init__(self, config: Config) -> None:
        self._longest_s = {
            "producer": LEASES * config.producer.lease_s,
            "trainer": LEASES * TRAINER_LEASE_S,
            "weights": LEASES * config.weights.lease_s,
        }
        self._silent_s: dict[str, float] = {}

    def too_long(self, parts: Iterable[Part], alive: Set[int], elapsed_s: float) -> list[tuple[Part, float]]:
        """Those to be ended, with their seconds; `alive` are the processes whose heartbeat is known.

        `elapsed_s` is the time since the last look. Parts that have not joined, that have ended or that were told to
        leave have bounds of their own.
        """
        silent = {}
        ended = []
        for part in parts:
            watched = part.role in self._longest_s and part.joined and part.running and not part.leaving
            if not watched or part.child is None or part.child.pid in alive:
                continue
            seconds = self._silent_s.get(part.name, 0.0) + elapsed_s
            if seconds >= self._longest_s[part.role]:
                ended.append((part, seconds))
            else:
                silent[part.name] = seconds
        self._silent_s = silent
        return ended
