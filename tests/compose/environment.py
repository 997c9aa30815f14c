"""An environment from a file, as a user mounts one: its rewards are by chance, so that every step moves something."""

from __future__ import annotations

from producers.environments.api import Rollout
from producers.environments.single_turn import SingleTurn


class Chance:
    def __len__(self) -> int:
        return 64

    def eval_size(self) -> int:
        return 8

    def episode(self, split: str, index: int, seed: int) -> SingleTurn:
        return SingleTurn(f"Number {index}.", answer="")

    async def score(self, rollout: Rollout) -> float:
        return float(len(rollout.completion) % 2)

    def correct(self, rollout: Rollout) -> bool:
        return bool(len(rollout.completion) % 2)
