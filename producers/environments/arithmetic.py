"""Sums, differences and products of small numbers, with a held-out part that shares no prompt with training.

Every expression has a rank: its operands and operators as the digits of one mixed-radix number. Held-out
expressions are a fixed set of ranks, so that training index `i` is the `i`-th rank that is not held out,
and no list of all expressions is ever made.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Sequence
from itertools import permutations
from random import Random

from headrace.errors import EnvironmentLoadError
from producers.environments.api import Rollout
from producers.environments.single_turn import SingleTurn

OPERATORS = ("+", "-", "*")
PROMPT = "What is {expression}? Reply with only the number."
HELD_OUT_SEED = 24
"""The held-out set is the same in every process and every run."""
LARGEST = 2**53
"""Expressions of the largest space: indices stay exact in any number format on their way."""
EXACT_TRIES = 10_000
"""Draws after which the held-out set may grow beyond its size rather than search on."""

_NUMBER = re.compile(r"(?<![\d.])-?\d+(?:\.\d+)?")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


class Arithmetic:
    """Expressions of `terms` numbers with up to `digits` digits, joined by `operators`.

    Its own reward is `exact` for the bare right number, `ended` for text that ends by itself with the right number as
    its last one, `cut` when that text was cut off at the token limit, else 0: the model learns to answer, then to
    stop, then to be brief. A rollout is correct when its last number is right. About `held_out` expressions are kept
    from training; when all operators of an expression commute, the other orders of its numbers are held out with it.
    """

    def __init__(
        self,
        *,
        digits: int = 1,
        terms: int = 2,
        operators: Sequence[str] = ("+",),
        prompt: str = PROMPT,
        exact: float = 1.0,
        ended: float = 0.8,
        cut: float = 0.3,
        held_out: int = 24,
    ) -> None:
        """Raises EnvironmentLoadError for an option that is out of range."""
        self._space = Space(digits, terms, tuple(operators))
        if "{expression}" not in prompt:
            raise EnvironmentLoadError(f"arithmetic: prompt = {prompt!r} has no place for {{expression}}")
        if not 0 <= held_out <= len(self._space) // 2:
            raise EnvironmentLoadError(
                f"arithmetic: held_out = {held_out} is not between 0 and half of the {len(self._space)} expressions"
            )
        self._prompt, self._exact, self._ended, self._cut = prompt, float(exact), float(ended), float(cut)
        self._held_out = held_out_ranks(self._space, held_out)
        self._skips = [rank - place for place, rank in enumerate(self._held_out)]

    def __len__(self) -> int:
        return len(self._space) - len(self._held_out)

    def eval_size(self) -> int:
        return len(self._held_out)

    def episode(self, split: str, index: int, seed: int) -> SingleTurn:
        """The seed does not matter: the index says it all."""
        rank = self._held_out[index] if split == "eval" else index + bisect_right(self._skips, index)
        numbers, operators = self._space.expression(rank)
        prompt = self._prompt.replace("{expression}", text_of(numbers, operators))
        return SingleTurn(prompt, value_of(numbers, operators))

    async def score(self, rollout: Rollout) -> float:
        if rollout.completion.strip() == str(rollout.answer):
            return self._exact
        if not self.correct(rollout):
            return 0.0
        return self._ended if rollout.finish_reason == "stop" else self._cut

    def correct(self, rollout: Rollout) -> bool:
        return last_number(rollout.completion) == float(rollout.answer)


class Space:
    """All expressions of one shape, counted through by rank."""

    def __init__(self, digits: int, terms: int, operators: tuple[str, ...]) -> None:
        """Raises EnvironmentLoadError for a shape that is out of range."""
        if not 1 <= digits <= 9:
            raise EnvironmentLoadError(f"arithmetic: digits = {digits} is not between 1 and 9")
        if not 2 <= terms <= 6:
            raise EnvironmentLoadError(f"arithmetic: terms = {terms} is not between 2 and 6")
        if not operators or not set(operators) <= set(OPERATORS):
            raise EnvironmentLoadError(
                f"arithmetic: operators = {list(operators)} is not a choice of {', '.join(OPERATORS)}"
            )
        self._base = 10**digits
        self._terms = terms
        self._operators = tuple(dict.fromkeys(operators))
        self._size = int(self._base**terms * len(self._operators) ** (terms - 1))
        if self._size > LARGEST:
            raise EnvironmentLoadError(
                f"arithmetic: digits = {digits} with terms = {terms} makes more than 2**53 expressions; lower one"
            )

    def __len__(self) -> int:
        return self._size

    def expression(self, rank: int) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Its numbers and the operators between them. Raises IndexError beyond the space."""
        if not 0 <= rank < len(self):
            raise IndexError(f"expression {rank} of {len(self)}")
        numbers, operators = [], []
        for _ in range(self._terms):
            rank, number = divmod(rank, self._base)
            numbers.append(number)
        for _ in range(self._terms - 1):
            rank, operator = divmod(rank, len(self._operators))
            operators.append(self._operators[operator])
        return tuple(numbers), tuple(operators)

    def rank(self, numbers: Sequence[int], operators: Sequence[str]) -> int:
        """The inverse of `expression`."""
        rank = 0
        for operator in reversed(operators):
            rank = rank * len(self._operators) + self._operators.index(operator)
        for number in reversed(numbers):
            rank = rank * self._base + number
        return rank

    def family(self, rank: int) -> set[int]:
        """Ranks of the expressions that say the same in another order, this one included."""
        numbers, operators = self.expression(rank)
        if len(set(operators)) > 1 or operators[0] == "-":
            return {rank}
        return {self.rank(order, operators) for order in permutations(numbers)}


def held_out_ranks(space: Space, count: int) -> list[int]:
    """`count` ranks in order, whole families only: the same ones for the same space and count."""
    random, chosen, tries = Random(HELD_OUT_SEED), set[int](), 0
    while len(chosen) < count:
        tries += 1
        family = space.family(random.randrange(len(space)))
        if len(chosen | family) <= count or tries > EXACT_TRIES:
            chosen |= family
    return sorted(chosen)


def text_of(numbers: Sequence[int], operators: Sequence[str]) -> str:
    """As in "4 + 7 * 2"."""
    rest = (f" {operator} {number}" for operator, number in zip(operators, numbers[1:], strict=True))
    return str(numbers[0]) + "".join(rest)


def value_of(numbers: Sequence[int], operators: Sequence[str]) -> int:
    """Products before sums and differences."""
    summands = [[numbers[0]]]
    for operator, number in zip(operators, numbers[1:], strict=True):
        if operator == "*":
            summands[-1].append(number)
        else:
            summands.append([number if operator == "+" else -number])
    return sum(math.prod(factors) for factors in summands)


def last_number(text: str) -> float | None:
    """The last number of a text, its thousands perhaps parted by commas; None without one."""
    found = _NUMBER.findall(_THOUSANDS.sub("", text))
    return float(found[-1]) if found else None
