"""The loops of the trainer.

Wait graph. Every wait is bounded by `broker.stream_block_ms`, after which it looks again.

    train    waits for: groups and evaluations (`Intake.arrived`, set by intake), its worker thread
    intake   waits for: stream `groups` (the broker wakes it)
    admit    waits for: a free slot (`Books.slots`, set by train when a batch is formed, by intake for each verdict)
    beat     waits for: a quarter of a lease
    obey     waits for: stream `orders` (the broker wakes it)

train ends when the last step is made, or the service stops, and ends the others; a loop that fails ends all. Each
looks at `_over` and does not rely on being cancelled alone, since before Python 3.12 a cancellation can get lost in
`asyncio.wait_for`, which the broker's client uses. No loop waits for a producer that waits for it: a version that
could not be published for want of room is published again while train waits for groups.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from broker.api import Peer
from broker.connect import Run
from consumers import evaluation
from consumers.asking import Admitter
from consumers.batch import Batch, Batcher
from consumers.books import Books
from consumers.checkpoint import RunPosition, optimizer_tensors
from consumers.evaluation import Result, Sheet
from consumers.export import export_tensors
from consumers.ingest import SeenTasks
from consumers.intake import Intake
from consumers.parts import Parts
from consumers.progress import Progress
from consumers.resume import Replay, plan_replay
from consumers.trainer import StepResult
from consumers.waiting import wait_for
from headrace.errors import CheckpointError
from headrace.policy.loading import load_model
from headrace.service import Service
from headrace.version import PolicyVersion
from weightsync.publisher import Publisher

log = logging.getLogger(__name__)
T = TypeVar("T")

NAME = "trainer"
LEASE_S = 10.0
AGAIN_S = 0.5
"""Between two attempts to publish a version that found no room."""


class TrainerLoops:
    """One trainer from its first version to its last."""

    def __init__(self, service: Service, port: Run, parts: Parts, publisher: Publisher, progress: Progress) -> None:
        self._service = service
        self._port = port
        self._parts = parts
        self._publisher = publisher
        self._progress = progress
        self._fence = fence = parts.fence
        self._lane = parts.lane
        self._block_ms = parts.config.broker.stream_block_ms
        step = parts.base_step
        cursor = parts.loaded.position.cursor if parts.loaded else 0
        self._books = books = Books(fence.incarnation, step, cursor, PolicyVersion(fence.incarnation, step), step)
        batcher = Batcher(parts.window.groups_per_step, parts.window.max_lag)
        seen = SeenTasks(parts.trained.capacity, parts.trained.ids())
        self._intake = Intake(port, fence, books, progress, batcher, seen, parts.window.slots)
        self._admitter = Admitter(port, fence, books, parts.config, parts.window, parts.curriculum)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="trainer")
        self._unpublished: PolicyVersion | None = None
        self._over = asyncio.Event()
        self._contact = time.monotonic()
        self.metrics_url = ""

    async def run(self) -> None:
        """All loops, until the run is at its end or the service stops; raises what ended it otherwise."""
        try:
            async with asyncio.TaskGroup() as group:
                for loop in (self.train, self.admit, self.beat, self.obey):
                    group.create_task(self._ending_all(loop), name=loop.__name__)
        finally:
            await self._publisher.close()
            await asyncio.to_thread(self._worker.shutdown)
            self._progress.close()
        await self._port.retire(NAME)
        self._service.stop("the trainer has ended")

    def health(self) -> dict[str, Any]:
        """What `/healthz` shows; not ok once no heartbeat was accepted for two leases."""
        return {"ok": time.monotonic() - self._contact < 2 * LEASE_S, "service": NAME, **self._state()}

    # -- loops

    async def train(self) -> None:
        """Resume, evaluate, make the steps, evaluate again. Waits for groups, which `intake` brings meanwhile."""
        await self._resume()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._ending_all(self.intake), name="intake")
            try:
                await self._publish(self._books.first)
                before = await self._evaluated_before()
                self._admitter.open_up()
                await self._steps()
                await self._conclude(before)
            finally:
                # Also after an error: the group would wait for an intake whose cancellation got lost.
                self._end_all()

    async def intake(self) -> None:
        """Takes groups from the broker, judges them, and wakes `train` and `admit`."""
        while not self._over.is_set():
            await self._intake.take(self._block_ms)

    async def admit(self) -> None:
        """Turns free slots into tasks."""
        while not self._over.is_set():
            self._books.slots.clear()
            if self._admitter.open and not self._service.stopping.is_set():
                await self._admitter.fill()
            await wait_for(self._books.slots, self._block_ms / 1000)

    async def beat(self) -> None:
        """Tells the broker that the trainer lives, and how it does."""
        while not self._over.is_set():
            peer = Peer(NAME, "trainer", socket.gethostname(), os.getpid(), True, self._state())
            await self._port.heartbeat(peer, LEASE_S)
            self._contact = time.monotonic()
            await wait_for(self._over, LEASE_S / 4)

    async def obey(self) -> None:
        """Leaves when it is ordered to."""
        after = "$"
        while not self._over.is_set():
            for order in await self._port.orders(after, self._block_ms):
                after = order.order_id
                if order.kind == "stop" and order.target in ("", NAME):
                    self._service.stop(order.reason or "a stop order")

    async def _ending_all(self, loop: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a loop whose end, whatever the reason, is the end of all."""
        try:
            await loop()
        finally:
            self._end_all()

    def _end_all(self) -> None:
        for event in (self._over, self._books.slots, self._intake.arrived):
            event.set()

    @property
    def _leaving(self) -> bool:
        return self._over.is_set() or self._service.stopping.is_set()

    # -- beginning and end

    async def _resume(self) -> None:
        """Take up where an earlier trainer stopped: repeat its steps after the checkpoint, keep its other groups."""
        books = self._books
        deliveries = await self._port.open_groups(self._fence)
        trains = [delivery for delivery in deliveries if delivery.group.kind == "train"]
        replay = plan_replay(await self._port.steps_after(books.formed), trains, books.formed, self._parts.trained)
        if replay.settled:
            await self._port.settle(self._fence, list(replay.settled))
        await self._replay(replay)
        books.cursor = max(books.cursor, (await self._admitter.sheet()).admitted)
        books.first = books.version
        for delivery in [d for d in deliveries if d.group.kind == "eval"] + list(replay.fresh):
            await self._intake.receive(delivery)

    async def _replay(self, replay: Replay) -> None:
        for batch in replay.batches:
            self._intake.remember(batch)
            self._books.took(batch)
            result = await self._train(batch)
            self._progress.replayed(batch, result, await self._port.peers())
        if replay.fork:
            self._progress.event("forked", step=self._books.formed, reason=replay.fork)
            log.warning("the step log is followed to step %d only: %s", self._books.formed, replay.fork)

    async def _conclude(self, before: Result | None) -> None:
        """A last checkpoint; when all steps are made also evaluation, export, summary, and everybody's end."""
        books, parts, out = self._books, self._parts, self._parts.folder / "model"
        if books.unsettled:
            await self._checkpoint()
        if books.formed < parts.config.run.steps or self._leaving:
            return
        after = await self._evaluate("after")
        if self._leaving:
            return

        def export() -> None:
            model = load_model(parts.model_folder, parts.config.model.wire_dtype, "cpu")
            export_tensors(parts.trainer.parameters(), model, parts.model_folder, out)

        with self._lane.during("export"):
            await self._in_worker(export)
        self._progress.summarize(before, after, await self._port.balance(), books.formed, out)
        await self._port.finish(self._fence, "finished", f"all {books.formed} steps are made")

    # -- evaluation

    async def _evaluated_before(self) -> Result | None:
        """The result from before the first step: kept by an earlier trainer, else made now."""
        file = self._parts.folder / "evaluation-before.json"
        kept = evaluation.load(file)
        if kept is not None or self._books.formed > 0:
            return kept
        result = await self._evaluate("before")
        if result is not None and not self._leaving:
            evaluation.save(result, file)
        return result

    async def _evaluate(self, when: str) -> Result | None:
        """Roll out the held-out prompts on the newest version; None where there is no evaluation."""
        if not self._parts.config.evaluation.prompts:
            return None
        sheet = Sheet(self._parts.decode)
        self._intake.sheet = sheet
        tasks = await self._admitter.evaluation(when, self._parts.held_out)
        sheet.expect([task.task_id for task in tasks])
        await self._admitter.ask(tasks)
        with self._lane.during("wait_evaluation"):
            await self._until(lambda: sheet.closed)
        result = sheet.result()
        self._progress.event("evaluation", when=when, accuracy=result.accuracy, samples=result.samples)
        return result

    # -- steps

    async def _steps(self) -> None:
        """Until all are made or the service stops."""
        while self._books.formed < self._parts.config.run.steps and not self._leaving:
            batch = await self._intake.form()
            if batch is None:
                with self._lane.during("wait_groups"):
                    await self._until(lambda: self._intake.missing == 0)
                continue
            await self._step(batch)
            if self._books.checkpoint_due(self._parts.config.checkpoint.every):
                await self._try_checkpoint()

    async def _step(self, batch: Batch) -> None:
        with self._lane.during("batch"):
            if self._progress.cold:
                self._progress.warm(await self._port.peers())
            await self._port.append_step(self._fence, batch.record)
        result = await self._train(batch)
        await self._publish(batch.version)
        with self._lane.during("report"):
            await self._port.set_step(self._fence, batch.version.step)
            self._progress.step(batch, result, await self._port.peers())
        if result.skipped:
            log.warning("step %d moved nothing: %s", batch.version.step, result.skipped)

    async def _train(self, batch: Batch) -> StepResult:
        groups = [delivery.group for delivery in batch.deliveries]
        for group in groups:
            self._parts.trained.add(group.task_id)
        return await self._in_worker(lambda: self._parts.trainer.train(groups, batch.version.step - 1))

    async def _publish(self, version: PolicyVersion) -> None:
        with self._lane.during("publish"):
            done = await self._publisher.publish(version, self._parts.trainer.parameters())
        self._unpublished = None if done else version
        if not done:
            self._progress.event("publish_skipped", version=str(version))

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait for arrivals until the condition holds or the service stops; publish what found no room before."""
        arrived = self._intake.arrived
        while not condition() and not self._leaving:
            arrived.clear()
            await wait_for(arrived, AGAIN_S if self._unpublished else self._block_ms / 1000)
            if self._unpublished:
                await self._publish(self._unpublished)

    # -- checkpoints

    async def _try_checkpoint(self) -> None:
        """One that cannot be written costs nothing but memory of the broker: it is tried again after the next step."""
        try:
            await self._checkpoint()
        except CheckpointError as error:
            self._progress.event("checkpoint_failed", step=self._books.formed, reason=str(error))
            log.error("%s; the run goes on, and tries again after the next step", error)

    async def _checkpoint(self) -> None:
        """Write one, and settle what it contains. Raises CheckpointError."""
        parts, books, batches = self._parts, self._books, list(self._books.unsettled)
        position = RunPosition(books.version, books.cursor, parts.trained.ids())

        def save() -> None:
            optimizer = optimizer_tensors(parts.model, parts.trainer.optimizer)
            parts.checkpoints.save(
                position, parts.config.model_dump(mode="json"), parts.trainer.parameters(), optimizer
            )

        with self._lane.during("checkpoint"):
            await self._in_worker(save)
            books.checkpointed = books.formed
            async with books.lock:
                trained = [item for batch in batches for item in batch.trained]
                await self._port.settle(self._fence, trained)
                del books.unsettled[: len(batches)]
        self._progress.event("checkpoint", step=books.formed)

    # -- small things

    async def _in_worker(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._worker, work)

    def _state(self) -> dict[str, Any]:
        sheet = self._intake.sheet
        return {
            "version": str(self._books.version),
            "step": self._books.formed,
            "phase": self._lane.phase,
            "missing_groups": self._intake.missing,
            "missing_evaluations": sheet.missing if sheet else 0,
            "retained_bytes": self._books.retained_bytes,
            "event_loop_lag_s": round(self._service.event_loop_lag_s, 4),
            "metrics_url": self.metrics_url,
            "seconds": {phase: round(spent, 3) for phase, spent in self._lane.seconds().items()},
            **self._progress.figures,
        }
