"""Completions to tokens per second: of a window, and of its parts, from when each completion was decoded. Pure.

An engine tells of a completion once it has ended. Its tokens are laid evenly over the time for which it had a slot, so
that a part counts what was decoded in it, and not what happened to end in it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

PARTS = 6
"""Of a window: the last beside the first tells whether the rate falls."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One completion: when it had a slot, in seconds of any one clock, and its tokens."""

    begin: float
    end: float
    tokens: int

    def within(self, begin: float, end: float) -> float:
        """The share of it that lies between two moments; of one that took no time, whether it does."""
        if self.end <= self.begin:
            return float(begin <= self.end < end)
        return max(0.0, min(self.end, end) - max(self.begin, begin)) / (self.end - self.begin)


def part_rates(pieces: Sequence[Piece], begin: float, end: float, parts: int = PARTS) -> list[float]:
    """Tokens per second in each of so many equal parts of the window."""
    width = (end - begin) / parts
    edges = [begin + width * part for part in range(parts + 1)]
    return [
        math.fsum(piece.tokens * piece.within(first, last) for piece in pieces) / width
        for first, last in itertools.pairwise(edges)
    ]


def in_flight(pieces: Sequence[Piece], begin: float, end: float) -> float:
    """Completions that had a slot at once, on average over the window."""
    held = math.fsum(max(0.0, min(piece.end, end) - max(piece.begin, begin)) for piece in pieces)
    return held / (end - begin)


def ended(pieces: Sequence[Piece], begin: float, end: float) -> list[Piece]:
    """Those that ended in the window."""
    return [piece for piece in pieces if begin <= piece.end < end]
