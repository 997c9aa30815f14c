"""Intake: groups from the broker, judged, to the batcher or the evaluation sheet."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from broker.messages import GroupDelivery, StepEntry, Task, Verdict
from consumers.asking import Admitter
from consumers.batch import Batch
from consumers.claim import Claim
from consumers.evaluations import Evaluations
from consumers.ingest import SeenTasks, entry, failed, has_signal, judge
from consumers.progress import Progress

MOST = 32
"""Groups taken at once."""
LATE = "no producer finished it within its deadline"
NEEDLESS = "the run made its last step without it"
"""A rollback makes a step without groups, and so leaves some that none needs."""
NO_SIGNAL = "all its rewards are equal"
"""With `trainer.dynamic_sampling`."""
WHENEVER_MS = -(1 << 60)
"""Overdue by this, tasks are whatever their deadline."""
HOPELESS = 10
"""So many times the admission slots may fail in a row, without one usable group, before the run gives up."""


class Intake:
    """What has arrived and is in no batch yet. Its size is bounded by admission."""

    def __init__(
        self,
        claim: Claim,
        admitter: Admitter,
        evaluations: Evaluations,
        progress: Progress,
        seen: SeenTasks,
        slots: int,
        replaced: int = 0,
    ) -> None:
        """`replaced`: groups without signal that are replaced in one step at most."""
        self._port = claim.port
        self._fence = claim.fence
        self._books = claim.books
        self._admitter = admitter
        self._progress = progress
        self._batcher = claim.books.batcher
        self._seen = seen
        self._most_failures = HOPELESS * slots
        self._failures = 0
        self._newest_failure = ""
        self._most_replaced = replaced
        self._replaced = 0
        """Since the last batch."""
        self._evaluations = evaluations
        self.arrived = asyncio.Event()
        """Set when a group came that a batch or an evaluation waits for, or when none is to be expected any more."""

    @property
    def hopeless(self) -> str:
        """Why the run is to end: nothing but failures has come for long. Empty while it is not to."""
        if self._failures < self._most_failures:
            return ""
        return f"the last {self._failures} groups all failed; the newest: {self._newest_failure}"

    @property
    def missing(self) -> int:
        """Groups that the next batch still lacks."""
        return self._batcher.missing()

    async def take(self, block_ms: int) -> None:
        """One round: wait for groups, and receive them."""
        for delivery in await self._port.take_groups(self._fence, MOST, block_ms):
            await self.receive(delivery)

    async def receive(self, delivery: GroupDelivery) -> None:
        group = delivery.group
        if group.kind == "eval":
            await self._evaluations.receive(delivery)
            self.arrived.set()
            return
        if self._seen.holds(group.task_id):
            # Redis lost the first one, which is still here: settling that closes the task, whatever entry it has.
            self._progress.event("second_group", task=group.task_id, verdict="held")
            return
        if before := self._seen.verdict(group.task_id):
            self._progress.event("second_group", task=group.task_id, verdict=before)
            await self.settle([entry(delivery, before)])
            return
        judged = judge(group)
        if judged is not None:
            await self._reject([(delivery, *judged)])
            self._count_failures(judged)
            return
        if self._admitter.over:
            await self._reject([(delivery, "filtered", NEEDLESS)])
            return
        self._failures = 0
        if self._replaced < self._most_replaced and not has_signal(group):
            # Its slot is free with the verdict, and admission asks a new prompt.
            self._replaced += 1
            await self._reject([(delivery, "filtered", NO_SIGNAL)])
            return
        self._books.largest = max(self._books.largest, delivery.nbytes)
        self._seen.hold(group.task_id)
        self._batcher.add(delivery)
        self.arrived.set()

    async def give_up(self, tasks: Sequence[Task]) -> None:
        """Tasks that nobody finished in time fail by rule: their slots are free, a group that comes is superseded."""
        for task in tasks:
            if task.kind == "eval":
                await self._evaluations.give_up(task, LATE)
                self.arrived.set()
            elif task.task_id not in self._seen:
                await self._reject([(GroupDelivery("", 0, failed(task, LATE)), "failed", LATE)])
                self._count_failures(("failed", LATE))

    async def form(self) -> Batch | None:
        """The next batch, when its groups are here; what has become stale is settled first."""
        books = self._books
        await self.drop_stale()
        batch = self._batcher.form(books.formed, books.history, books.incarnation)
        if batch is not None:
            self._replaced = 0
            books.took(batch)
        return batch

    async def drop_stale(self) -> None:
        """Settle what has become stale, until none is left: others may arrive meanwhile."""
        books = self._books
        while stale := self._batcher.drop_stale(books.formed, books.history):
            await self._reject([(delivery, "stale", reason) for delivery, reason in stale])

    async def forgo(self) -> None:
        """After the last step: settle what waits for a batch, and tasks that still have no group."""
        waiting = self._batcher.give_up()
        tasks = [task for task in await self._port.overdue(WHENEVER_MS) if task.kind == "train"]
        waiting += [GroupDelivery("", 0, failed(task, NEEDLESS)) for task in tasks if task.task_id not in self._seen]
        await self._reject([(delivery, "filtered", NEEDLESS) for delivery in waiting])

    async def settle(self, entries: Sequence[StepEntry]) -> None:
        """Settle groups that no batch will use, this time or already once; stale prompts are asked again before."""
        await self._admitter.again(item.task_id for item in entries if item.verdict == "stale")
        for item in entries:
            self._seen.judge(item.task_id, item.verdict)
        await self._port.settle(self._fence, list(entries))
        self._books.slots.set()

    def remember(self, batch: Batch) -> None:
        """The groups of a batch that an earlier trainer formed: a second one of theirs is a duplicate."""
        for delivery in batch.deliveries:
            self._books.largest = max(self._books.largest, delivery.nbytes)
            self._seen.hold(delivery.group.task_id)

    async def _reject(self, rejected: Sequence[tuple[GroupDelivery, Verdict, str]]) -> None:
        """Groups that no batch will use: noted in the next step record, settled now, their slots free."""
        if not rejected:
            return
        entries = [entry(delivery, verdict, reason) for delivery, verdict, reason in rejected]
        for item, (delivery, _, _) in zip(entries, rejected, strict=True):
            self._batcher.note(item)
            self._progress.dropped(delivery.group, item)
        await self.settle(entries)

    def _count_failures(self, judged: tuple[Verdict, str]) -> None:
        if judged[0] in ("failed", "dead"):
            self._failures += 1
            self._newest_failure = judged[1]
        if self.hopeless:
            self.arrived.set()
