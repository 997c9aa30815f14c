"""Saving: when a checkpoint is taken, and what happens when it cannot be.

Without room on the disk nothing is lost: groups stay in the broker until a checkpoint contains their step. So steps go
on while what is retained is below its bound; then the trainer waits, says so, and tries again.
"""

from __future__ import annotations

import time
from pathlib import Path

from consumers.checkpoint import RunPosition
from consumers.claim import Claim
from consumers.ingest import SeenTasks
from consumers.parts import Parts
from consumers.progress import Progress
from consumers.retention import Retention
from consumers.troubles import Troubles
from consumers.worker import Worker
from headrace.errors import CheckpointError

FIRST_AGAIN_S, LAST_AGAIN_S = 1.0, 60.0
"""Between two attempts to write what could not be written."""


class Saver:
    """Takes the checkpoints of one trainer."""

    def __init__(
        self, claim: Claim, parts: Parts, seen: SeenTasks, progress: Progress, troubles: Troubles, worker: Worker
    ) -> None:
        self._claim = claim
        self._port = claim.port
        self._books = claim.books
        self._parts = parts
        self._seen = seen
        self._progress = progress
        self._troubles = troubles
        self._worker = worker
        self._retention = Retention.of(parts.config)
        self._mended = 0
        """How often Redis had been made whole when the newest checkpoint was taken."""
        self._again_at = 0.0
        self._again_s = FIRST_AGAIN_S

    @property
    def due(self) -> bool:
        """Whether one should be taken before the next step."""
        books = self._books
        if not books.unsettled or time.monotonic() < self._again_at:
            return False
        late = books.formed - books.checkpointed >= self._parts.config.checkpoint.every
        failed = "checkpoint" in self._troubles
        return failed or late or self._port.mended > self._mended or self._retention.early(books.retained)

    @property
    def full(self) -> bool:
        """Whether no step may be made before one is taken."""
        return self._retention.full(self._books.retained)

    @property
    def again_s(self) -> float | None:
        """Seconds until it is tried again; None where nothing failed."""
        return max(0.0, self._again_at - time.monotonic()) if "checkpoint" in self._troubles else None

    async def attempt(self) -> bool:
        """Take one, if anything is to be saved; False, with the reason said, when it could not be written."""
        if not self._books.unsettled:
            return True
        try:
            await self._take()
        except CheckpointError as error:
            self._progress.event("checkpoint_failed", step=self._books.formed, reason=str(error))
            self._troubles.begin("checkpoint", f"{error}; nothing is lost, and it is tried again")
            self._again_at = time.monotonic() + self._again_s
            self._again_s = min(2 * self._again_s, LAST_AGAIN_S)
            return False
        self._troubles.end("checkpoint")
        self._again_at, self._again_s = 0.0, FIRST_AGAIN_S
        return True

    async def _take(self) -> None:
        """Write one, then settle what it contains, then remove old ones. Raises CheckpointError."""
        parts, books = self._parts, self._books
        steps, mended = len(books.unsettled), self._port.mended
        trained = [item for step in books.unsettled for item in step.entries]
        seen = self._seen.with_trained(item.task_id for item in trained)
        position = RunPosition(books.version, books.cursor, seen)
        config = parts.config.model_dump(mode="json")

        def prepare() -> Path:
            return parts.checkpoints.prepare(position, config, *parts.trainer.state())

        with parts.lane.during("checkpoint"):
            final = await self._worker(prepare)
            await self._claim.confirm()
            await self._worker(lambda: parts.checkpoints.place(final))
            books.checkpointed, self._mended = books.formed, mended
            async with books.lock:
                for item in trained:
                    self._seen.judge(item.task_id, item.verdict)
                await self._port.settle(self._claim.fence, trained)
                books.settled(steps)
            await self._worker(parts.checkpoints.trim)
        self._progress.event("checkpoint", step=books.formed)
