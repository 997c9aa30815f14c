"""Environments with one fault each, for `headrace env check`, and two without."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
import stat
import threading
import time
from typing import Any

from producers.environments.api import Done, Message, Observation, Rollout, Turn
from producers.environments.multi_turn import MultiTurn
from producers.environments.single_turn import SingleTurn

_count = itertools.count()


class Fine:
    """Says back what it was told; right is an echo."""

    prompts = 5
    held_out = 3

    def __len__(self) -> int:
        return self.prompts

    def eval_size(self) -> int:
        return self.held_out

    def episode(self, split: str, index: int, seed: int) -> Any:
        return SingleTurn(f"Say {split} {index}.", f"{split} {index}")

    async def score(self, rollout: Rollout) -> float:
        return float(rollout.completion == rollout.answer)

    def correct(self, rollout: Rollout) -> bool:
        return bool(rollout.completion == rollout.answer)


class Game(Fine):
    def episode(self, split: str, index: int, seed: int) -> Any:
        number, told = random.Random(seed).randrange(5), itertools.count(1)

        def reply(turn: Turn) -> Done | Observation:
            if next(told) == 3:
                return Done(0.5)
            return Observation((Message("user", "Again."),), reward=0.25)

        return MultiTurn(f"{split} {index} {number}", number, reply)


def half(rollout: Rollout) -> float:
    """A reward of its own."""
    return 0.5


class Given(Game):
    """Judges by what was given meanwhile, as rollouts have it."""

    def correct(self, rollout: Rollout) -> bool:
        if (rollout.given, [turn.reward for turn in rollout.turns]) != (0.5, [0.25, 0.25, 0.0]):
            raise ValueError("what was given is missing")
        return True


class Empty(Fine):
    prompts = 0


class Unending(Fine):
    def episode(self, split: str, index: int, seed: int) -> Any:
        return MultiTurn(f"{split} {index}", "", lambda turn: "And then?")


class Fickle(Fine):
    def episode(self, split: str, index: int, seed: int) -> Any:
        return SingleTurn(f"{split} {index} {next(_count)}", "")


class Overlapping(Fine):
    def episode(self, split: str, index: int, seed: int) -> Any:
        return SingleTurn(f"Say {index}.", "")


class WrongReset(Fine):
    def episode(self, split: str, index: int, seed: int) -> Any:
        episode = SingleTurn("", "")
        episode.reset = self._reset  # type: ignore[method-assign]
        return episode

    async def _reset(self) -> Any:
        return "What is 2 + 2?"


class WrongStep(Fine):
    def episode(self, split: str, index: int, seed: int) -> Any:
        return MultiTurn(f"{split} {index}", "", lambda turn: 1.0)  # type: ignore[arg-type, return-value]


class NoClose(Fine):
    def episode(self, split: str, index: int, seed: int) -> Any:
        return object()


class RaisingClose(Fine):
    def episode(self, split: str, index: int, seed: int) -> Any:
        return _RaisingClose(f"{split} {index}", "")


class _RaisingClose(SingleTurn):
    async def close(self) -> None:
        raise OSError("the container is gone")


class Waiting(Fine):
    def episode(self, split: str, index: int, seed: int) -> Any:
        return _Waiting(f"{split} {index}", "")


class _Waiting(SingleTurn):
    async def reset(self) -> Observation:
        await asyncio.Event().wait()
        raise AssertionError


class Blocking(Fine):
    def episode(self, split: str, index: int, seed: int) -> Any:
        return _Blocking(f"{split} {index}", "")


class _Blocking(SingleTurn):
    async def reset(self) -> Observation:
        time.sleep(0.15)  # noqa: ASYNC251 - that is the fault
        return await super().reset()


class Standing(Fine):
    def episode(self, split: str, index: int, seed: int) -> Any:
        threading.Event().wait()


class Killing(Fine):
    def episode(self, split: str, index: int, seed: int) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


class Huge(Fine):
    def episode(self, split: str, index: int, seed: int) -> Any:
        return SingleTurn("x" * 1_000_000, "4")


class Scribbling(Fine):
    """It writes to every pipe that its process has, and then leaves."""

    def episode(self, split: str, index: int, seed: int) -> Any:
        for number in range(3, 64):
            with contextlib.suppress(OSError):
                if stat.S_ISFIFO(os.fstat(number).st_mode):
                    os.write(number, b"\xff[1]\n" + b"[" * 5000 + b"\n[]\n")
        os._exit(3)


class Unpicklable(Fine):
    def episode(self, split: str, index: int, seed: int) -> Any:
        return SingleTurn(f"{split} {index}", lambda text: text == "4")


class NotANumber(Fine):
    async def score(self, rollout: Rollout) -> float:
        return float("nan")


class Text(Fine):
    async def score(self, rollout: Rollout) -> Any:
        return "good"


class Random(Fine):
    async def score(self, rollout: Rollout) -> float:
        return float(next(_count))


class NoVerdict(Fine):
    def correct(self, rollout: Rollout) -> Any:
        return "yes"


class Long(Fine):
    def episode(self, split: str, index: int, seed: int) -> Any:
        return SingleTurn(f"{split} {index}" + "x" * 600, "")


class Tight(Fine):
    def episode(self, split: str, index: int, seed: int) -> Any:
        return SingleTurn(f"{split} {index}" + "x" * 450, "")


class ScoredElsewhere(Fine):
    """Raises in the processes that score, which inherit the variable that the first process sets."""

    def __init__(self) -> None:
        self._away = "HEADRACE_TEST_CHECKED" in os.environ
        os.environ["HEADRACE_TEST_CHECKED"] = "1"

    async def score(self, rollout: Rollout) -> float:
        if self._away:
            raise FileNotFoundError("answers.db")
        return 1.0
