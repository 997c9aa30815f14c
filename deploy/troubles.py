"""What a service says in its heartbeat that it cannot go on for: `troubles`, a list of kind, reason and since when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from broker.api import Peer


@dataclass(frozen=True, slots=True)
class Trouble:
    kind: str
    reason: str
    since: float
    """Seconds since the epoch."""


def troubles(peer: Peer, peers: Sequence[Peer]) -> list[Trouble]:
    """What one of `peers` says. Left out is what is not of that form, and a missing producer once there is one again:
    who said that has not looked since."""
    found = _said(peer.state)
    if any(other.alive and other.role == "producer" for other in peers):
        found = [trouble for trouble in found if trouble.kind != "producers"]
    return found


def _said(said: dict[str, Any]) -> list[Trouble]:
    rows = said.get("troubles")
    found = []
    for row in rows if isinstance(rows, list) else []:
        if isinstance(row, dict) and isinstance(row.get("reason"), str) and isinstance(row.get("since"), int | float):
            found.append(Trouble(str(row.get("kind")), row["reason"], float(row["since"])))
    return found
