"""The course: one trainer's way from where an earlier one stopped to the last step and what is written at the end."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from broker.api import Peer
from consumers import export
from consumers.agreement import Agreement
from consumers.asking import Admitter
from consumers.batch import Batch
from consumers.claim import Claim
from consumers.contents import Content, Contents
from consumers.evaluation import Result
from consumers.evaluations import Evaluations
from consumers.ingest import SeenTasks
from consumers.intake import Intake
from consumers.lag import History
from consumers.outputs import Outputs
from consumers.parts import Parts
from consumers.progress import Progress
from consumers.resume import Replay, plan_replay
from consumers.rollback import Asked, Rollbacks
from consumers.saving import Saver
from consumers.trainer import StepResult
from consumers.troubles import Troubles
from consumers.turns import Turns
from consumers.versions import Versions
from consumers.waiting import wait_for
from consumers.watch import Watch
from consumers.worker import Worker
from headrace.errors import CheckpointError, ServiceError
from headrace.policy.loading import load_model
from headrace.telemetry.clock import now
from headrace.version import PolicyVersion
from weightsync.transports.api import Unavailable

log = logging.getLogger(__name__)
T = TypeVar("T")

AGAIN_S = 0.5
"""Between two attempts to publish a version that found no room, or two looks at what is outstanding at the end."""
WRITE_AGAIN_S = 5.0
"""Between two attempts to write what a run has at its end."""


@dataclass(slots=True, kw_only=True)
class Course:
    claim: Claim
    parts: Parts
    seen: SeenTasks
    progress: Progress
    troubles: Troubles
    agreement: Agreement
    worker: Worker
    watch: Watch
    admitter: Admitter
    intake: Intake
    saver: Saver
    evaluations: Evaluations
    versions: Versions
    outputs: Outputs
    contents: Contents
    rollbacks: Rollbacks
    turns: Turns
    leaving: Callable[[], bool]
    """Whether the trainer is to leave."""

    async def run(self) -> None:
        """Make the steps, and evaluate beside them; after `resume`, and while groups are taken in."""
        await self.versions.publish(self.claim.books.first)
        # Nobody may sample on a later one before this incarnation's beginning is known.
        await self._until(lambda: self.versions.unpublished is None)
        await self._begin_evaluations()
        self.admitter.open_up()
        await self._steps()
        await self._conclude()

    # -- beginning

    async def resume(self) -> None:
        """Take up where an earlier trainer stopped: repeat its steps after the checkpoint, keep its other groups."""
        port, books = self.claim.port, self.claim.books
        deliveries = await port.open_groups(self.claim.fence)
        trains = [delivery for delivery in deliveries if delivery.group.kind == "train"]
        records = await port.steps_after(books.formed)
        history = History(await port.reigns())
        restored = {record.restored for record in records if record.restored is not None}
        found = {version: await self.contents.read(version) for version in restored}
        gone = {version: content.reason for version, content in found.items() if isinstance(content, Unavailable)}
        replay = plan_replay(records, trains, books.formed, self.seen, self.parts.staleness, history, gone)
        for item in (item for record in records for item in record.entries if item.verdict != "trained"):
            self.seen.judge(item.task_id, item.verdict)
        await self._replay(replay, found)
        books.begin(history)
        self._say_fork(replay, history)
        if replay.settled:
            await self.intake.settle(replay.settled)
        for delivery in [d for d in deliveries if d.group.kind == "eval"] + list(replay.fresh):
            await self.intake.receive(delivery)

    async def _replay(self, replay: Replay, found: Mapping[PolicyVersion, Content | Unavailable]) -> None:
        for batch in replay.batches:
            self.intake.remember(batch)
            self.claim.books.took(batch)
            result = None
            if batch.restored is None:
                async with self.turns.turn():
                    result = await self._train(batch, now())
            elif isinstance(content := found[batch.restored], Content):
                await self._restore(content)
            self.progress.replayed(batch, result, await self.claim.port.peers())
        if any(batch.restored for batch in replay.batches):
            await self._save()

    def _say_fork(self, replay: Replay, history: History) -> None:
        """The step from which this incarnation goes its own way is the first of its reign."""
        books = self.claim.books
        # Redis may have lost its end with the steps; then the run's folder knows better.
        given_up = max(history.given_up(books.first), self.progress.newest - books.formed)
        if not replay.fork and given_up < 1:
            return
        reason = replay.fork or f"the step log ends {given_up} steps before the newest that was made"
        self.progress.event("forked", step=books.formed, given_up=given_up, reason=reason)
        log.warning("the history forks at step %d, %d steps after it are given up: %s", books.formed, given_up, reason)

    # -- evaluation

    async def _begin_evaluations(self) -> None:
        """Go on with the one that an earlier trainer began, or begin the one that is due; nobody waits for either."""
        evaluations, first = self.evaluations, self.claim.books.first
        await evaluations.resume()
        if evaluations.wants_before():
            await evaluations.begin("before", first)
        elif evaluations.missed(first.step):
            await evaluations.begin("step", first)

    async def _evaluate_beside(self, version: PolicyVersion) -> None:
        if self.versions.unpublished is None:
            await self.evaluations.begin("step", version)
        else:
            self.evaluations.skip(version, "no memory was free to publish it")

    async def _evaluated(self) -> Result | None:
        """The result of the last version, once every evaluation has its own; None where there is no evaluation."""
        books, loaded = self.claim.books, self.parts.loaded
        same = loaded.position.version if loaded and books.formed == self.parts.base_step else None
        evaluations = self.evaluations
        with self.parts.lane.during("wait_evaluation"):
            await self._until(lambda: evaluations.idle, groups=True)
            if evaluations.wants_after(same) and not self.leaving():
                await self._until(lambda: self.versions.unpublished is None)
                if self.leaving():
                    return None
                await evaluations.begin("after", books.version)
                await self._until(lambda: evaluations.idle, groups=True)
        return evaluations.of(books.version, same)

    # -- steps

    async def _steps(self) -> None:
        """Until all are made or the service stops."""
        while self.claim.books.formed < self.parts.config.run.steps and not self.leaving():
            await self.versions.keep()
            if asked := self.rollbacks.next():
                await self._roll_back(asked)
                continue
            if self.saver.due:
                await self.saver.begin()
            if not self.saver.full and await self._stepped():
                continue
            groups = self.saver.again_s is None and not self.saver.full
            with self.parts.lane.during("wait_groups" if groups else "wait_checkpoint"):
                await self._until(self._may_go_on, groups=groups)

    def _may_go_on(self) -> bool:
        return bool(self.rollbacks) or self.saver.due or (self.intake.missing == 0 and not self.saver.full)

    async def _stepped(self) -> bool:
        """Make a step; False where groups are missing, or the service is told to leave while it waits for its turn."""
        await self.intake.drop_stale()
        if self.intake.missing:
            return False
        async with self.turns.turn(self.leaving) as has:
            batch = await self.intake.form() if has else None
            if batch is None:
                return False
            await self._step(batch)
            return True

    async def _step(self, batch: Batch) -> None:
        port, formed = self.claim.port, now()
        with self.parts.lane.during("batch_assembly"):
            if self.progress.cold:
                self.progress.warm(await port.peers())
            await port.append_step(self.claim.fence, batch.record)
        result = await self._train(batch, formed)
        await self.versions.publish(batch.version)
        if self.evaluations.due(batch.version.step):
            await self._evaluate_beside(batch.version)
        with self.parts.lane.during("report"):
            self.progress.step(batch, result, await self._made(batch))
            self.agreement.judge(batch.version.step, result.drift)
        if result.skipped:
            log.warning("step %d moved nothing: %s", batch.version.step, result.skipped)

    async def _made(self, batch: Batch) -> list[Peer]:
        """A step is made: say so. Returns who is there."""
        self.claim.books.made = batch.version.step
        await self.claim.confirm()
        peers = await self.claim.port.peers()
        self.watch.note(peers)
        return peers

    async def _train(self, batch: Batch, formed: float) -> StepResult:
        groups, before = [delivery.group for delivery in batch.deliveries], batch.version.step - 1
        result = await self.worker(lambda: self.parts.trainer.train(groups, before, batch.version.incarnation))
        self.progress.trained(batch, result, formed)
        return result

    # -- rollback

    async def _roll_back(self, asked: Asked) -> None:
        """A step without groups, which takes an earlier version's weights back.

        A checkpoint contains it before anybody samples from it: what is published cannot be made anew once the old
        version's memory is freed.
        """
        books, lane = self.claim.books, self.parts.lane
        if self.saver.again_s is not None:
            self.rollbacks.refuse(asked, "the checkpoint that it needs cannot be written now (see `headrace status`)")
            return
        with lane.during("restore"):
            content = await self.contents.read(asked.version)
            if isinstance(content, Unavailable):
                self.rollbacks.refuse(asked, content.reason)
                return
            self.versions.give_up()
            async with books.lock:
                batch = Batch(PolicyVersion(books.incarnation, books.formed + 1), (), (), restored=asked.version)
                books.took(batch)
            await self.claim.port.append_step(self.claim.fence, batch.record)
            async with self.turns.turn():
                await self._restore(content)
        await self._save()
        if books.unsettled:
            return
        await self.versions.publish(batch.version)
        with lane.during("report"):
            await self._made(batch)
            self.progress.restored(batch)
            self.progress.event("restored", step=batch.version.step, version=str(asked.version), source=content.source)
        self.rollbacks.done(asked, batch.version)

    async def _restore(self, content: Content) -> None:
        await self.worker(lambda: self.parts.trainer.restore(content.tensors))

    # -- the end

    async def _conclude(self) -> None:
        """A last checkpoint; when all steps are made also evaluation, export, summary, and everybody's end."""
        books, config = self.claim.books, self.parts.config
        await self._save()
        if books.formed < config.run.steps or self.leaving():
            return
        self.rollbacks.close(f"the run is at its end: all {books.formed} steps are made")
        await self._forgo()
        after = await self._evaluated()
        if self.leaving():
            return
        export.check_place(self.parts.folder / "model", self.parts.model_folder)
        with self.parts.lane.during("export"):
            out = await self._insist(lambda: self.outputs.write_folder("model", self._export))
        if out is None:
            return
        evaluations, balance = self.evaluations, await self.claim.port.balance()
        summary = self.progress.summary(evaluations.before(), after, evaluations.all(), balance, books.formed, out)
        if await self._insist(lambda: self.outputs.write_json("summary.json", summary)) is not None:
            await self.claim.port.finish(self.claim.fence, "finished", f"all {books.formed} steps are made")

    async def _forgo(self) -> None:
        """Settle what a rollback left over: its step used no groups. Until nothing changes any more."""
        left = 0
        while (outstanding := (await self.admitter.sheet()).outstanding) != left and not self.leaving():
            left = outstanding
            await self.intake.forgo()
            await self._pause(AGAIN_S)

    async def _save(self) -> None:
        """A checkpoint of what no other contains; without room for it, wait for some or leave."""
        while not await self.saver.attempt():
            if self.leaving():
                steps = len(self.claim.books.unsettled)
                log.error("leaving without a checkpoint of %d steps: they are made again from the step log", steps)
                return
            with self.parts.lane.during("wait_checkpoint"):
                await self._until(lambda: self.saver.again_s == 0.0)

    async def _export(self, work: Path) -> None:
        def prepare() -> None:
            model = load_model(self.parts.model_folder, self.parts.config.model.wire_dtype, "cpu")
            origin = export.Origin(self.parts.run_id, self.claim.books.version)
            export.prepare(self.parts.trainer.weights(), origin, model, self.parts.model_folder, work)

        await self.worker(prepare)

    # -- waiting

    async def _until(self, condition: Callable[[], bool], *, groups: bool = False) -> None:
        """Wait for arrivals until the condition holds or the service stops; keep the versions published meanwhile.

        Raises ServiceError when it waits for groups and none is to be expected: the run was without producers for as
        long as it may be, or nothing but failures came. It has then ended the run as failed: another trainer would
        find the same.
        """
        arrived, longest_s = self.intake.arrived, self.parts.config.broker.stream_block_ms / 1000
        while not condition() and not self.leaving():
            arrived.clear()
            wait_s = AGAIN_S if self.versions.unpublished else longest_s
            again_s = self.saver.again_s
            await wait_for(arrived, wait_s if again_s is None else min(wait_s, again_s + 0.01))
            await self.versions.keep()
            if groups and (reason := self.watch.deserted or self.intake.hopeless):
                await self.saver.attempt()
                await self.claim.port.finish(self.claim.fence, "failed", reason)
                raise ServiceError(reason)

    async def _insist(self, write: Callable[[], Awaitable[T]]) -> T | None:
        """What `write` returns, once there is room for it; None when the service stops before that."""
        while not self.leaving():
            try:
                written = await write()
            except CheckpointError as error:
                self.progress.event("write_failed", reason=str(error))
                self.troubles.begin("file", f"{error}; it is tried again")
                await self._pause(WRITE_AGAIN_S)
                continue
            self.troubles.end("file")
            return written
        return None

    async def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        await self._until(lambda: time.monotonic() >= until)
