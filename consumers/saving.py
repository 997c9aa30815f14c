"""Saving: when a checkpoint is taken, and what happens when it cannot be.

Without room on the disk nothing is lost: groups stay in the broker until a checkpoint contains their step. So steps go
on while what is retained is below its bound; then the trainer waits, says so, and tries again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from broker.messages import StepEntry
from consumers.checkpoint import RunPosition, optimizer_tensors
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


@dataclass(frozen=True, slots=True)
class _Content:
    """What a checkpoint contains, as of when it was taken."""

    position: RunPosition
    steps: int
    """The oldest unsettled ones."""
    trained: tuple[StepEntry, ...]
    mended: int
    """How often Redis had been made whole."""


class Saver:
    """Takes the checkpoints of one trainer."""

    def __init__(
        self,
        claim: Claim,
        parts: Parts,
        seen: SeenTasks,
        progress: Progress,
        troubles: Troubles,
        worker: Worker,
        wake: Callable[[], None],
    ) -> None:
        """`wake` is called once one that was written while steps went on has ended."""
        self._claim = claim
        self._port = claim.port
        self._books = claim.books
        self._parts = parts
        self._seen = seen
        self._progress = progress
        self._troubles = troubles
        self._worker = worker
        self._wake = wake
        self._config = parts.config.model_dump(mode="json")
        self._behind: asyncio.Task[None] | None = None
        """The one that is under way."""
        self._retention = Retention.of(parts.config)
        self._mended = 0
        """How often Redis had been made whole when the newest checkpoint was taken."""
        self._again_at = 0.0
        self._again_s = FIRST_AGAIN_S

    @property
    def due(self) -> bool:
        """Whether one should be taken before the next step, or one that was under way has ended."""
        books = self._books
        if self._behind is not None:
            return self._behind.done()
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
        """Have all that is made in one; False, with the reason said, when one could not be written."""
        while self._behind is not None or self._books.unsettled:
            if not await self.begin():
                return False
        return True

    async def begin(self) -> bool:
        """Take one, if anything is to be saved, or wait for the one that is under way.

        Where ranks have parts of the model, it is copied here and written while steps go on: then it is under way.
        False, with the reason said, when it could not be written.
        """
        try:
            if self._behind is not None:
                await self._written()
            elif self._books.unsettled:
                await self._take()
            if self._behind is not None:
                return True
        except CheckpointError as error:
            self._progress.event("checkpoint_failed", step=self._books.formed, reason=str(error))
            self._troubles.begin("checkpoint", f"{error}; nothing is lost, and it is tried again")
            self._again_at = time.monotonic() + self._again_s
            self._again_s = min(2 * self._again_s, LAST_AGAIN_S)
            return False
        self._troubles.end("checkpoint")
        self._again_at, self._again_s = 0.0, FIRST_AGAIN_S
        return True

    async def close(self) -> None:
        """Give up the one that is under way."""
        if self._behind is not None:
            self._behind.cancel()
            await asyncio.wait([self._behind])

    async def _take(self) -> None:
        """Write one, or begin to. Raises CheckpointError."""
        parts, books = self._parts, self._books
        trained = tuple(item for step in books.unsettled for item in step.entries)
        seen = self._seen.with_trained(item.task_id for item in trained)
        position = RunPosition(books.version, books.cursor, seen)
        content = _Content(position, len(books.unsettled), trained, self._port.mended)

        def prepare() -> Path:
            optimizer = optimizer_tensors(parts.model, parts.trainer.optimizer)
            return parts.checkpoints.prepare(position, self._config, parts.trainer.parameters(), optimizer)

        with parts.lane.during("checkpoint"):
            if not parts.ranks.sharded:
                await self._settle(await self._worker(prepare), content)
                return
            writing = await self._worker(lambda: parts.trainer.save(parts.checkpoints.begin(position.version)))
        self._behind = asyncio.create_task(self._await_ranks(writing, content), name="checkpoint")
        self._behind.add_done_callback(lambda _: self._wake())

    async def _written(self) -> None:
        """The one that is under way has ended. Raises what it raised."""
        task, self._behind = self._behind, None
        assert task is not None
        await task

    async def _await_ranks(self, writing: Future[dict[str, str]], content: _Content) -> None:
        """All ranks have written theirs."""
        checkpoints, position = self._parts.checkpoints, content.position
        try:
            digests = await asyncio.wrap_future(writing)
        except CheckpointError as error:
            raise checkpoints.failed(position.version, str(error)) from error
        await self._settle(await asyncio.to_thread(checkpoints.seal, position, self._config, digests), content)

    async def _settle(self, final: Path, content: _Content) -> None:
        """Put it in its place, settle what it contains, then remove old ones. Raises CheckpointError."""
        books, step = self._books, content.position.version.step
        await self._claim.confirm()
        await asyncio.to_thread(self._parts.checkpoints.place, final)
        books.checkpointed, self._mended = step, content.mended
        async with books.lock:
            for item in content.trained:
                self._seen.judge(item.task_id, item.verdict)
            await self._port.settle(self._claim.fence, list(content.trained))
            books.settled(content.steps)
        await asyncio.to_thread(self._parts.checkpoints.trim)
        self._progress.event("checkpoint", step=step)
