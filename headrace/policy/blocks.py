"""Blocks: rollouts that share a prefix, laid out in one row of tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Block:
    """Where one group lies in a row: `prefix` tokens from `start`, then suffixes of these lengths.

    The prefix is causal. Suffix i sees the prefix and itself, causally, and its positions go on where the prefix ends.
    """

    start: int
    prefix: int
    suffixes: tuple[int, ...]

    @property
    def length(self) -> int:
        return self.prefix + sum(self.suffixes)

    @property
    def end(self) -> int:
        return self.start + self.length
