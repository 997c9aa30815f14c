"""A number to be found out in a few turns, told after each guess whether it is higher or lower."""

from __future__ import annotations

import re
from dataclasses import dataclass
from random import Random

from headrace.errors import EnvironmentLoadError
from producers.environments.api import Done, Message, Observation, Rollout, Turn
from producers.environments.multi_turn import MultiTurn, Reply

PROMPT = "Guess my number, from {low} to {high}. Reply with only the number."
HELD_OUT_SEED = 24
"""The held-out ranges are the same in every process and every run."""
LARGEST = 1 << 53

_NUMBER = re.compile(r"-?\d+")


@dataclass(frozen=True, slots=True)
class Secret:
    """What a reward needs to know of one game; both ends of the range can be the number."""

    number: int
    low: int
    high: int
    turns: int


class GuessNumber:
    """Games over ranges of `size` numbers; the first range begins at `lowest`, the next one `step` later, and so on.

    The final reward is 1 for the right number in the first of `turns` turns and less by equal parts for each later one,
    0 when it is not found. Each turn before it with a number in the range is worth `valid` at once, which should be
    little: less than the part that is lost with a turn. Of the `ranges`, `held_out` are kept
    from training, with all of their numbers: no prompt is seen in both.
    """

    def __init__(
        self,
        *,
        size: int = 10,
        turns: int = 10,
        lowest: int = 1,
        step: int = 1,
        ranges: int = 20,
        held_out: int = 4,
        valid: float = 0.02,
        prompt: str = PROMPT,
        system: str = "",
    ) -> None:
        """Raises EnvironmentLoadError for an option that is out of range."""
        _check(size=size, turns=turns, step=step, ranges=ranges)
        if "{low}" not in prompt or "{high}" not in prompt:
            raise EnvironmentLoadError(f"guess_number: prompt = {prompt!r} has no place for {{low}} and {{high}}")
        if not 0 <= held_out < ranges:
            raise EnvironmentLoadError(
                f"guess_number: held_out = {held_out} is not between 0 and ranges - 1 = {ranges - 1}"
            )
        if not 0 <= valid < 1 / turns:
            raise EnvironmentLoadError(
                f"guess_number: valid = {valid} is not between 0 and 1 / turns = {1 / turns:.3g}"
            )
        self._size, self._turns, self._valid, self._prompt, self._system = size, turns, valid, prompt, system
        lows = [lowest + step * place for place in range(ranges)]
        held = set(Random(HELD_OUT_SEED).sample(lows, held_out))
        self._lows = {"train": [low for low in lows if low not in held], "eval": sorted(held)}

    def __len__(self) -> int:
        return len(self._lows["train"]) * self._size

    def eval_size(self) -> int:
        return len(self._lows["eval"]) * self._size

    def episode(self, split: str, index: int, seed: int) -> MultiTurn:
        """The seed does not matter: the index says range and number."""
        place, offset = divmod(index, self._size)
        low = self._lows[split][place]
        secret = Secret(low + offset, low, low + self._size - 1, self._turns)
        prompt = self._prompt.replace("{low}", str(low)).replace("{high}", str(secret.high))
        return MultiTurn(prompt, secret, _Game(secret, self._valid).reply, system=self._system)

    async def score(self, rollout: Rollout) -> float:
        found = turn_of(rollout)
        return 0.0 if found is None else 1.0 - found / self._turns

    def correct(self, rollout: Rollout) -> bool:
        return turn_of(rollout) is not None


class _Game:
    def __init__(self, secret: Secret, valid: float) -> None:
        self._secret, self._valid, self._left = secret, valid, secret.turns

    def reply(self, turn: Turn) -> Reply:
        self._left -= 1
        secret, guess = self._secret, guessed(turn.text)
        if guess == secret.number or not self._left:
            return Done()
        if guess is None or not secret.low <= guess <= secret.high:
            return f"Only a number from {secret.low} to {secret.high}."
        hint = "Higher." if guess < secret.number else "Lower."
        return Observation((Message("user", hint),), reward=self._valid)


def turn_of(rollout: Rollout) -> int | None:
    """The turn, from 0, in which the number was said; None when it was not."""
    guesses = (guessed(turn.text) for turn in rollout.turns)
    return next((place for place, guess in enumerate(guesses) if guess == rollout.answer.number), None)


def guessed(text: str) -> int | None:
    """The only number in a text; None without one, and with several, so that listing them all is no guess."""
    found = _NUMBER.findall(text)
    return int(found[0]) if len(found) == 1 and len(found[0]) < 20 else None


def _check(**options: int) -> None:
    for name, value in options.items():
        if not 1 <= value <= LARGEST:
            raise EnvironmentLoadError(f"guess_number: {name} = {value} is not at least 1")
    if options["ranges"] > 100_000:
        raise EnvironmentLoadError(f"guess_number: ranges = {options['ranges']} is more than 100000")
