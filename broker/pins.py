"""Weight versions that people keep."""

from __future__ import annotations

from broker.bounds import MAX_PINS
from headrace.errors import Refused


def too_many_pins() -> Refused:
    return Refused(
        f"{MAX_PINS} weight versions are pinned already, each of which keeps its memory; "
        "let one go first with `headrace weights unpin`"
    )
