"""How much of the prompts one step computes, so that no running sequence waits long for another's prompt.

Work is counted in tokens without a context: a token with c others before it counts 1 + c / `wide`, where `wide` is the
context whose attention costs as much as everything else; a copied page of keys and values counts as one token.
"""

from __future__ import annotations

import math

from producers.engines.kv_pages import PAGE

LEAST = PAGE
"""Tokens of a step at least, whatever they cost: smaller chunks cost more than they spare."""
EVEN = 16
"""Chunks that cost decides about are multiples of so many tokens: each new shape costs a kernel generation."""
MEMORY = 0.8
"""Share of what was measured that the next measurement leaves."""


class Budget:
    """What one step may still take: tokens to compute, and work."""

    __slots__ = ("_tokens", "_wide", "_work", "spent")

    def __init__(self, tokens: int, work: float = math.inf, wide: float = math.inf) -> None:
        self.spent = 0.0
        """Work that was taken."""
        self._tokens, self._work, self._wide = tokens, work, wide

    def chunk(self, start: int, wanted: int) -> int:
        """Take up to `wanted` tokens that follow `start` cached ones; returns how many.

        A step's first chunk may have LEAST tokens whatever they cost, so that every prompt comes to its end.
        """
        price = 1 + (start + min(wanted, self._tokens)) / self._wide
        affordable = (self._work - self.spent) / price
        if not self.spent:
            affordable = max(affordable, LEAST)
        count = min(wanted, self._tokens)
        if affordable < count:
            count = max(0, int(affordable))
            count -= count % EVEN if count > EVEN else 0
        self._tokens -= count
        self.spent += count * price
        return count

    def fits(self, tokens: int) -> bool:
        """Whether a prompt of `tokens` may be copied; the first of a step always may."""
        return not self.spent or self.spent + _pages(tokens) <= self._work

    def copy(self, tokens: int) -> None:
        """Take the copy of a prompt of `tokens`."""
        self.spent += _pages(tokens)


class Pace:
    """Learns from the steps what they cost, and sets the budget of the next one by it."""

    def __init__(self, tokens: int, gap: float, wide: float) -> None:
        """At most `tokens` of a step are computed; while others decode, a step takes at most about as long as `gap`
        steps without prompts.
        """
        self._tokens, self._gap, self._wide = tokens, gap, wide
        self._decode, self._prompts = _Rate(), _Rate()

    def budget(self, *, decoding: bool) -> Budget:
        """Of the next step. `decoding`: whether there is a running sequence that waits for its end."""
        step_s, work_s = self._decode.seconds, self._prompts.seconds
        if not decoding or not step_s or not work_s:
            return Budget(self._tokens, wide=self._wide)
        return Budget(self._tokens, (self._gap - 1) * step_s / work_s, self._wide)

    def note(self, seconds: float, work: float) -> None:
        """A step took `seconds`, with so much `work` of prompts in it."""
        if not work:
            self._decode.add(seconds, 1)
        elif work >= LEAST:
            self._prompts.add(max(0.0, seconds - self._decode.seconds), work)


class _Rate:
    """Seconds of one unit, as far as was measured; newer measurements count more."""

    def __init__(self) -> None:
        self._total_s = self._units = 0.0

    @property
    def seconds(self) -> float:
        """0 before there is any."""
        return self._total_s / self._units if self._units else 0.0

    def add(self, seconds: float, units: float) -> None:
        self._total_s = self._total_s * MEMORY + seconds
        self._units = self._units * MEMORY + units


def _pages(tokens: int) -> int:
    return -(-tokens // PAGE)
