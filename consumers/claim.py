"""The claim: this trainer's right to the run, and how it asks whether it still has it."""

from __future__ import annotations

from dataclasses import dataclass

from broker.api import Fence
from broker.connect import Run
from consumers.books import Books


@dataclass(frozen=True, slots=True)
class Claim:
    port: Run
    fence: Fence
    books: Books

    async def confirm(self) -> None:
        """Raises Fenced when a newer trainer has taken the run. Redis is whole then, or was made so.

        It says again how far the run is, which changes nothing.
        """
        await self.port.set_step(self.fence, self.books.made)
