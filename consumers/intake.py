"""Intake: groups from the broker, judged, to the batcher or the evaluation sheet."""

from __future__ import annotations

import asyncio

from broker.api import Fence, TrainerPort
from broker.messages import GroupDelivery, StepEntry
from consumers.batch import Batch, Batcher
from consumers.books import Books
from consumers.evaluation import Sheet
from consumers.ingest import SeenTasks, entry, judge
from consumers.progress import Progress
from headrace.errors import ServiceError

MOST = 32
"""Groups taken at once."""
HOPELESS = 10
"""So many times the admission slots may fail in a row, without one usable group, before the run gives up."""


class Intake:
    """What has arrived and is in no batch yet. Its size is bounded by admission."""

    def __init__(
        self,
        port: TrainerPort,
        fence: Fence,
        books: Books,
        progress: Progress,
        batcher: Batcher,
        seen: SeenTasks,
        slots: int,
    ) -> None:
        self._port = port
        self._fence = fence
        self._books = books
        self._progress = progress
        self._batcher = batcher
        self._seen = seen
        self._most_failures = HOPELESS * slots
        self._failures = 0
        self.sheet: Sheet | None = None
        """The evaluation that is open now."""
        self.arrived = asyncio.Event()
        """Set when a group came that a batch or an evaluation waits for."""

    @property
    def missing(self) -> int:
        """Groups that the next batch still lacks."""
        return self._batcher.missing()

    async def take(self, block_ms: int) -> None:
        """One round: wait for groups, and receive them."""
        for delivery in await self._port.take_groups(self._fence, MOST, block_ms):
            await self.receive(delivery)

    async def receive(self, delivery: GroupDelivery) -> None:
        """Raises ServiceError when nothing but failures has come for long."""
        if delivery.group.kind == "eval":
            await self._receive_evaluation(delivery)
            return
        judged = judge(delivery.group, self._seen)
        if judged is None:
            self._failures = 0
            self._batcher.add(delivery)
            self.arrived.set()
            return
        await self._reject([entry(delivery, *judged)])
        self._failures += judged[0] in ("failed", "dead")
        if self._failures >= self._most_failures:
            raise ServiceError(f"the last {self._failures} groups all failed; the newest: {judged[1]}")

    async def form(self) -> Batch | None:
        """The next batch, when its groups are here; what has become stale is settled first."""
        books = self._books
        await self._reject(self._batcher.drop_stale(books.formed, books.first))
        batch = self._batcher.form(books.formed, books.first)
        if batch is not None:
            books.took(batch)
        return batch

    def remember(self, batch: Batch) -> None:
        """The groups of a batch that an earlier trainer formed: a second one of theirs is a duplicate."""
        for delivery in batch.deliveries:
            self._seen.add(delivery.group.task_id)

    async def _receive_evaluation(self, delivery: GroupDelivery) -> None:
        known = self.sheet is not None and self.sheet.add(delivery.group)
        verdict = entry(delivery, "evaluated") if known else entry(delivery, "superseded", "an earlier trainer asked")
        await self._port.settle(self._fence, [verdict])
        self.arrived.set()

    async def _reject(self, verdicts: list[StepEntry]) -> None:
        """Groups that no batch will use: noted in the next step record, settled now, their slots free."""
        if not verdicts:
            return
        for verdict in verdicts:
            self._batcher.note(verdict)
            self._progress.event(verdict.verdict, task=verdict.task_id, reason=verdict.reason)
        await self._port.settle(self._fence, verdicts)
        self._books.slots.set()
