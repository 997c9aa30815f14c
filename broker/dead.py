"""Why a dead letter cannot be replayed: the sentences that both brokers say. Pure."""

from __future__ import annotations

from typing import Literal

from broker.bounds import MAX_DEAD_BYTES
from headrace.errors import Refused

Obstacle = Literal["unknown", "foreign", "cut", "outstanding"]

_WHY: dict[Obstacle, str] = {
    "unknown": "is not there; `headrace dead list` shows those that are",
    "foreign": "names no task, so nothing would wait for what it becomes; drop it",
    "cut": f"was longer than the {MAX_DEAD_BYTES} bytes that are kept, so it cannot be put back whole; drop it",
    "outstanding": "belongs to a task that is outstanding again; replay it once that is settled, or drop it",
}


def obstacle(letter_id: str, what: Obstacle) -> Refused:
    """The error that names the letter and what stands in its way."""
    return Refused(f"the dead letter {letter_id!r} {_WHY[what]}")
