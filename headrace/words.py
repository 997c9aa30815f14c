"""Numbers in sentences."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """ "1 step", "2 steps", "1,000 steps"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
