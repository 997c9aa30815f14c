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
        self._rollouts: dict[int, Rollout] = {}
        self._scores: dict[int, Score] = {}
        self._complete = asyncio.Event()
        self._asking = asyncio.Lock()

    async def join(self, member: int, rollout: Rollout) -> Score:
        """Waits for all others, then for the scores."""
        self._rollouts[member] = rollout
        self.out(member)
        await self._complete.wait()
        # Whoever comes first asks for all. When it is cancelled, so are the others: they end together.
        async with self._asking:
            if not self._scores:
                # Not in the order in which they ended, which is another one when the group is played again.
                members = sorted(self._rollouts)
                scores = await self._ask([self._rollouts[each] for each in members])
                self._scores = dict(zip(members, scores, strict=True))
        return self._scores[member]

    def out(self, member: int) -> None:
        """It is not waited for any more. Idempotent."""
        self._missing.discard(member)
        if not self._missing:
            self._complete.set()
