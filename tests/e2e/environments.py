"""Environments and rewards of the tests, as a user would write them."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from producers.environments.api import Observation, Rollout
from producers.environments.single_turn import SingleTurn

PROMPTS = 64


class Counting:
    """Prompts that differ by a number; `padding` more characters make them longer."""

    def __init__(self, *, padding: int = 0) -> None:
        self._padding = "x" * padding

    def __len__(self) -> int:
        return PROMPTS

    def eval_size(self) -> int:
        return PROMPTS

    def episode(self, split: str, index: int, seed: int) -> SingleTurn:
        return SingleTurn(f"{split} {index}{self._padding}", answer=index)

    async def score(self, rollout: Rollout) -> float:
        """Bytes that a random model says about half of the time."""
        return sum(letter.isascii() for letter in rollout.completion) / max(1, len(rollout.completion))

    def correct(self, rollout: Rollout) -> bool:
        return False


class Gated(Counting):
    """No episode begins while the file `gate` exists."""

    def __init__(self, *, gate: str) -> None:
        super().__init__()
        self._gate = Path(gate)

    def episode(self, split: str, index: int, seed: int) -> SingleTurn:
        return Waiting(f"{split} {index}", index, self._gate)


class Examined(Gated):
    """No held-out episode begins while the file `gate` exists; training goes on. Some answers are right."""

    def episode(self, split: str, index: int, seed: int) -> SingleTurn:
        gated = super().episode(split, index, seed)
        return gated if split == "eval" else SingleTurn(f"{split} {index}", answer=index)

    def correct(self, rollout: Rollout) -> bool:
        return sum(map(ord, rollout.completion)) % 2 == 0


class Waiting(SingleTurn):
    def __init__(self, prompt: str, answer: int, gate: Path) -> None:
        super().__init__(prompt, answer=answer)
        self._gate = gate

    async def reset(self) -> Observation:
        while self._gate.exists():  # noqa: ASYNC110 - another process removes it
            await asyncio.sleep(0.01)
        return await super().reset()


async def partly_broken(rollout: Rollout) -> float:
    """Raises for a quarter of the prompts, and never answers for one of them."""
    if rollout.answer == 6:
        time.sleep(1000)  # noqa: ASYNC251 - as a bad reward would
    if rollout.answer % 4 == 3:
        raise ValueError(f"no reward for {rollout.answer}")
    return float(len(set(rollout.completion)))
