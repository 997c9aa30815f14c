"""A multi-turn environment of one's own with a tool: what a basket costs, with prices that only the tool knows.

Run it with `headrace up --config examples/own_tools.toml`; docs/environments.md explains it. The signature and the
docstring of `price` are all that the model is told about it.
"""

from itertools import product
from typing import Literal

from producers.environments.api import Rollout
from producers.environments.tools import Toolbox, ToolUse

PRICES = {"apple": 3, "bread": 7, "cheese": 11, "melon": 5}


def price(item: Literal["apple", "bread", "cheese", "melon"], count: int = 1) -> int:
    """Says what things cost.

    Args:
        item: What to buy.
        count: How many of it.
    """
    if count < 1:
        raise ValueError("count must be at least 1")  # the model reads this, and the episode goes on
    return PRICES[item] * count


class Shop:
    """Every basket of one kind of thing and up to `most` of it; those of a count that divides by 4 are held out."""

    def __init__(self, *, most: int = 9) -> None:
        self.tools = Toolbox([price])
        baskets = list(product(PRICES, range(1, most + 1)))
        self.baskets = {
            "train": [basket for basket in baskets if basket[1] % 4],
            "eval": [basket for basket in baskets if not basket[1] % 4],
        }

    def __len__(self) -> int:
        return len(self.baskets["train"])

    def eval_size(self) -> int:
        return len(self.baskets["eval"])

    def episode(self, split: str, index: int, seed: int) -> ToolUse:
        item, count = self.baskets[split][index]
        prompt = f"Item: {item}. Count: {count}. Look up the price, then reply with only the number."
        return ToolUse(
            prompt,
            PRICES[item] * count,
            self.tools,
            # At once, for a turn whose calls all gave a result; the final reward comes on top.
            reward=lambda results: 0.0 if any(result.failed for result in results) else 0.1,
        )

    async def score(self, rollout: Rollout) -> float:
        return 1.0 if self.correct(rollout) else 0.0

    def correct(self, rollout: Rollout) -> bool:
        return rollout.completion.strip() == str(rollout.answer)
