"""Shares: which environment each training prompt is drawn from, spread evenly and known from the prompt's number.

The shares of a run are exact fractions. Over a cycle of their common denominator every environment has its share to
the prompt; inside it the order is that of Tijdeman, 1980 (The chairman assignment problem, Discrete Mathematics 32), in
which no environment is ever as much as one prompt ahead of its share or behind it. So nothing has to be kept or
counted: number n stands at place n modulo the cycle, in cycle n div its length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

LONGEST_CYCLE = 10_000
"""Prompts; shares that need a longer one are rounded to its parts."""


def shares(weights: Sequence[float], least: Sequence[float]) -> list[Fraction]:
    """Shares that sum to 1: in proportion to the weights, but nobody below its least one.

    The least ones sum to at most 1 and some weight is above 0. Numbers are read as they are written: 0.1 is a tenth.
    """
    wanted = [_written(weight) for weight in weights]
    floors = [_written(share) for share in least]
    raised: set[int] = set()
    while True:
        free = [i for i in range(len(wanted)) if i not in raised]
        rest = 1 - sum((floors[i] for i in raised), Fraction(0))
        total = sum((wanted[i] for i in free), Fraction(0))
        given = {i: rest * wanted[i] / total if total else Fraction(0) for i in free}
        below = {i for i in free if given[i] < floors[i]}
        if not below:
            return [given.get(i, floors[i]) for i in range(len(wanted))]
        raised |= below


def counts(exact: Sequence[Fraction], longest: int = LONGEST_CYCLE) -> list[int]:
    """Prompts of each in one cycle: exact when a cycle of at most `longest` can be, else by largest remainder."""
    length = math.lcm(*(share.denominator for share in exact))
    if length > longest:
        length = longest
    whole = [int(share * length) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: (whole[i] - exact[i] * length, i))
    for i in by_remainder[: length - sum(whole)]:
        whole[i] += 1
    return whole


def order(counted: Sequence[int]) -> list[int]:
    """A cycle in which i stands `counted[i]` times, and in every prefix within one of its share of that prefix."""
    length, slack = sum(counted), max(1, 2 * len(counted) - 2)
    had = [0] * len(counted)
    cycle: list[int] = []
    for place in range(1, length + 1):
        # In units of 1 / (length * slack): how far each is behind its share once this place is given.
        behind = [slack * (place * share - length * so_far) for share, so_far in zip(counted, had, strict=True)]
        due = [i for i, units in enumerate(behind) if counted[i] and units >= length]
        # Of those that may have it, the one that would be too late the soonest.
        chosen = min(due, key=lambda i: Fraction(length * (slack - 1) - behind[i], counted[i]))
        had[chosen] += 1
        cycle.append(chosen)
    return cycle


def _written(number: float) -> Fraction:
    return Fraction(repr(number))
