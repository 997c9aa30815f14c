"""Dead letters of a run in memory."""

from __future__ import annotations

from dataclasses import replace

from broker.dead import obstacle
from broker.looks import DeadLetter
from broker.memory.service import MemoryService, number


class MemoryDead(MemoryService):
    """The part of OperatorPort about dead letters."""

    async def dead(self, after: str, count: int) -> list[DeadLetter]:
        place = number(after)
        letters = [dead.letter for letter_id, dead in self.store.dead.items() if number(letter_id) > place]
        return [replace(letter, body=b"") for letter in letters[: max(0, count)]]

    async def dead_letter(self, letter_id: str) -> DeadLetter:
        dead = self.store.dead.get(letter_id)
        if dead is None:
            raise obstacle(letter_id, "unknown")
        return dead.letter

    async def replay_dead(self, letter_id: str) -> None:
        store, letter = self.store, await self.dead_letter(letter_id)
        if not letter.task_id or letter.kind not in ("train", "eval"):
            raise obstacle(letter_id, "foreign")
        if letter.length != len(letter.body):
            raise obstacle(letter_id, "cut")
        if letter.task_id in store.open:
            raise obstacle(letter_id, "outstanding")
        store.replay(store.dead[letter_id])

    async def drop_dead(self, letter_ids: list[str]) -> int:
        return sum(self.store.dead.pop(letter_id, None) is not None for letter_id in letter_ids)
