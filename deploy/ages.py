"""How long ago something was, for people."""

from __future__ import annotations

_UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"))


def age(seconds: float) -> str:
    """ "12 s", "5 min", "3 h", "2 d": the largest unit that fits."""
    for size, unit in _UNITS:
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{int(seconds)} s"
