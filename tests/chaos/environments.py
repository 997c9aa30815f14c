"""What the producers of a chaos run play."""

from __future__ import annotations

from producers.environments.api import Rollout
from producers.environments.single_turn import SingleTurn

PROMPTS = 256


class Counting:
    """Prompts that differ by a number, and a reward that differs from rollout to rollout, so that every step moves."""

    def __len__(self) -> int:
        return PROMPTS

    def eval_size(self) -> int:
        return PROMPTS

    def episode(self, split: str, index: int, seed: int) -> SingleTurn:
        return SingleTurn(f"{split} {index}", answer=index)

    async def score(self, rollout: Rollout) -> float:
        return sum(letter.isascii() for letter in rollout.completion) / max(1, len(rollout.completion))

    def correct(self, rollout: Rollout) -> bool:
        return False
