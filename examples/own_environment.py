"""An environment and a reward of one's own: say two words in the other order.

Run it with `headrace up --config examples/own_environment.toml`. An environment makes episodes and says how to
score them; `SingleTurn` is the episode of one prompt and one completion. For more turns, write a class with
`reset`, `step`, `close` and `answer` yourself: see `producers/environments/api.py`.
"""

from itertools import permutations

from producers.environments.api import Rollout
from producers.environments.single_turn import SingleTurn

WORDS = ("apple", "river", "house", "green", "music", "stone", "cloud", "paper", "horse", "light", "table", "water")


class Swap:
    """Pairs of words; every fifth pair, in both orders, is kept for evaluation."""

    def __init__(self, *, prompt: str = 'Say these two words in the other order: "{first} {second}"') -> None:
        self.prompt = prompt
        pairs = list(permutations(WORDS, 2))
        self.pairs = {
            "train": [pair for pair in pairs if not kept_back(*pair)],
            "eval": [pair for pair in pairs if kept_back(*pair)],
        }

    def __len__(self) -> int:
        return len(self.pairs["train"])

    def eval_size(self) -> int:
        return len(self.pairs["eval"])

    def episode(self, split: str, index: int, seed: int) -> SingleTurn:
        first, second = self.pairs[split][index]
        return SingleTurn(self.prompt.format(first=first, second=second), answer=f"{second} {first}")

    async def score(self, rollout: Rollout) -> float:
        """The environment's own reward; a run may name another one, as this example does."""
        return 1.0 if self.correct(rollout) else 0.0

    def correct(self, rollout: Rollout) -> bool:
        return rollout.answer in rollout.completion.lower()


def kept_back(first: str, second: str) -> bool:
    return (WORDS.index(first) + WORDS.index(second)) % 5 == 0


def reward(rollout: Rollout) -> float:
    """Full marks for the answer alone, half for the answer in more text. It may be async, and may raise."""
    said = rollout.completion.strip().strip('"').lower()
    if said == rollout.answer:
        return 1.0
    return 0.5 if rollout.answer in said else 0.0
