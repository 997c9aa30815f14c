"""Members of a group that wait for each other, because their reward is relative to the others'."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from producers.environments.api import Rollout
from producers.rewards.worker import Score

Ask = Callable[[Sequence[Rollout]], Awaitable[Sequence[Score]]]
"""A Score for each rollout, in their order."""


class Gathering:
    """Of `size` members, each joins with its rollout or is out. Once all have done so, those that joined are scored.

    Nobody is asked where nobody has joined.
    """

    def __init__(self, size: int, ask: Ask) -> None:
        self._missing = set(range(size))
        self._ask = ask
        self._rollouts: list[Rollout] = []
        self._scores: Sequence[Score] | None = None
        self._complete = asyncio.Event()
        self._asking = asyncio.Lock()

    async def join(self, member: int, rollout: Rollout) -> Score:
        """Waits for all others, then for the scores."""
        place = len(self._rollouts)
        self._rollouts.append(rollout)
        self.out(member)
        await self._complete.wait()
        # Whoever comes first asks for all. When it is cancelled, so are the others: they end together.
        async with self._asking:
            if self._scores is None:
                self._scores = await self._ask(self._rollouts)
        return self._scores[place]

    def out(self, member: int) -> None:
        """It is not waited for any more. Idempotent."""
        self._missing.discard(member)
        if not self._missing:
            self._complete.set()
