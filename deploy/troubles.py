"""What a service says in its heartbeat that it cannot go on for: `troubles`, a list of kind, reason and since when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Trouble:
    kind: str
    reason: str
    since: float
    """Seconds since the epoch."""


def troubles(said: dict[str, Any]) -> list[Trouble]:
    """What is not of that form is left out."""
    rows = said.get("troubles")
    found = []
    for row in rows if isinstance(rows, list) else []:
        if isinstance(row, dict) and isinstance(row.get("reason"), str) and isinstance(row.get("since"), int | float):
            found.append(Trouble(str(row.get("kind")), row["reason"], float(row["since"])))
    return found
