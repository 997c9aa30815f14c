"""Text of unknown origin, such as what a model or an environment said, on a person's terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    """Without anything that a terminal would obey."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
