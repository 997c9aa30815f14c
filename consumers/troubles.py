"""Troubles: what keeps the trainer from going on, or from going well, why, and since when; for its log, its heartbeat
and its health."""

from __future__ import annotations

import logging
import time
from typing import Any, Literal

log = logging.getLogger(__name__)

Kind = Literal["checkpoint", "engine", "file", "lines", "logs", "producers"]
"""A checkpoint that cannot be written; engines that compute another policy; a file at the end; the journals; an
experiment log; no producer is there."""


class Troubles:
    """At most one of each kind at a time."""

    def __init__(self) -> None:
        self._now: dict[Kind, tuple[str, float]] = {}

    def begin(self, kind: Kind, reason: str) -> None:
        """Also when it goes on, perhaps for another reason: since when stays what it was."""
        since = self._now[kind][1] if kind in self._now else time.time()
        if kind not in self._now or self._now[kind][0] != reason:
            log.error("%s", reason)
        self._now[kind] = reason, since

    def end(self, kind: Kind) -> None:
        if kind in self._now:
            reason, since = self._now.pop(kind)
            log.warning("over after %.0f s: %s", time.time() - since, reason)

    def __contains__(self, kind: Kind) -> bool:
        return kind in self._now

    def shown(self) -> list[dict[str, Any]]:
        """Kind, reason, and since when (seconds since the epoch), the oldest first."""
        rows = sorted(self._now.items(), key=lambda item: item[1][1])
        return [{"kind": kind, "reason": reason, "since": round(since, 1)} for kind, (reason, since) in rows]
