"""The loops of the trainer.

Wait graph. Every wait is bounded by `broker.stream_block_ms`, after which it looks again; every call of the broker by
`broker.outage_s`.

    train    waits for: groups and evaluations (`Intake.arrived`, set by intake, and by obey for a rollback), its worker
             thread, room on the disk
    intake   waits for: stream `groups` (the broker wakes it)
    admit    waits for: a free slot (`Books.slots`, set by train when a batch is formed or a checkpoint frees room, by
             intake for each verdict)
    beat     waits for: a quarter of a lease
    obey     waits for: stream `orders` (the broker wakes it)
    in_line  waits for: the line for a device that it shares (the broker wakes it), a quarter of a lease
    heed     waits for: nothing; it looks every `PERIOD_S` whether another rank of this trainer has failed
    hasten   waits for: the service's stop, and tells the broker's port then that it has no more patience

train ends when the last step is made, or the service stops, and ends the others; a loop that fails ends all. Each
looks at `_over` and does not rely on being cancelled alone, since before Python 3.12 a cancellation can get lost in
`asyncio.wait_for`, which the broker's client uses. No loop waits for a producer that waits for it: a version that
could not be published for want of room is published again while train waits for groups.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine
from typing import Any

from broker.api import Peer
from broker.connect import Run
from consumers.agreement import Agreement
from consumers.asking import Admitter
from consumers.batch import Batcher
from consumers.books import Books
from consumers.claim import Claim
from consumers.contents import Contents
from consumers.course import Course
from consumers.evaluations import Evaluations
from consumers.intake import Intake
from consumers.outputs import Outputs
from consumers.parts import Parts
from consumers.progress import Progress
from consumers.ranks.alarm import PERIOD_S
from consumers.ranks.orders import End
from consumers.rollback import Rollbacks
from consumers.saving import Saver
from consumers.troubles import Troubles
from consumers.turns import Turns, device_in_turns
from consumers.versions import Versions
from consumers.waiting import wait_for
from consumers.watch import Watch
from consumers.worker import Worker
from headrace.errors import ServiceError
from headrace.hosts import host_name
from headrace.service import Service
from headrace.telemetry import clock
from weightsync.publisher import Publisher

NAME = "trainer"
LEASE_S = 10.0


class TrainerLoops:
    """One trainer from its first version to its last."""

    def __init__(self, service: Service, port: Run, parts: Parts, publisher: Publisher, progress: Progress) -> None:
        self._service = service
        self._port = port
        self._publisher = publisher
        self._progress = progress
        self._lane = parts.lane
        self._block_ms = parts.config.broker.stream_block_ms
        batcher = Batcher(parts.window.groups_per_step, parts.staleness)
        step = parts.base_step
        self._books = Books(parts.fence.incarnation, step, parts.cursor, batcher, step, parts.made)
        self._claim = claim = Claim(port, parts.fence, self._books)
        self._troubles = troubles = Troubles()
        self._ranks = parts.ranks
        self._worker = worker = Worker("trainer", parts.ranks.explaining)
        self._watch = watch = Watch(claim, parts.config, progress, troubles)
        self._admitter = admitter = Admitter(
            claim, parts.config, parts.window, parts.curriculum, parts.seen, progress.admitted
        )
        self._evaluations = evaluations = Evaluations(
            claim, parts.config, parts.held_out, admitter, progress, parts.decode, parts.folder
        )
        replaced = parts.config.trainer.dynamic_sampling * parts.window.groups_per_step
        self._intake = intake = Intake(claim, admitter, evaluations, progress, parts.seen, parts.window.slots, replaced)
        self._rollbacks = rollbacks = Rollbacks(intake.arrived.set)
        self._device = device = device_in_turns(port, parts.config)
        self._course = Course(
            claim=claim,
            parts=parts,
            seen=parts.seen,
            progress=progress,
            troubles=troubles,
            agreement=Agreement(parts.config, progress, troubles),
            worker=worker,
            watch=watch,
            admitter=admitter,
            intake=intake,
            saver=Saver(claim, parts, parts.seen, progress, troubles, worker, intake.arrived.set),
            evaluations=evaluations,
            versions=Versions(claim, parts, publisher, progress, worker, evaluations),
            outputs=Outputs(parts.folder, parts.fence.incarnation, claim.confirm),
            contents=Contents(port, parts, worker),
            rollbacks=rollbacks,
            turns=Turns(device, parts.lane, parts.trainer.free),
            leaving=lambda: self._leaving,
        )
        self._over = asyncio.Event()
        self._contact = time.monotonic()
        self.metrics_url = ""

    async def run(self) -> None:
        """All loops, until the run is at its end or the service stops; raises what ended it otherwise."""
        try:
            async with asyncio.TaskGroup() as group:
                for loop in (self.train, self.admit, self.beat, self.obey, self.in_line, self.heed):
                    group.create_task(self._ending_all(loop), name=loop.__name__)
                group.create_task(self.hasten(), name="hasten")
            await self._worker(lambda: self._ranks.tell(End()))
        finally:
            await self._course.saver.close()
            await self._publisher.close()
            await self._worker.close()
            self._evaluations.close()
            self._progress.close()
            self._look_at_logs()
        # The name is the next trainer's once it has the run.
        await self._claim.confirm()
        await self._port.retire(NAME)
        self._service.stop("the trainer has ended")

    def health(self) -> dict[str, Any]:
        """What `/healthz` shows; not ok before its first weights are out, nor once no heartbeat was accepted for two
        leases."""
        serves = self._publisher.stats().published > 0
        heard = time.monotonic() - self._contact < 2 * LEASE_S
        return {"ok": serves and heard, "starting": not serves, "service": NAME, **self._state()}

    # -- loops

    async def train(self) -> None:
        """Resume, make the steps, end the evaluations. Waits for groups, which `intake` brings meanwhile."""
        await self._course.resume()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._ending_all(self.intake), name="intake")
            try:
                await self._course.run()
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
        """Tells the broker that the trainer lives, and how it does; looks who else does."""
        while not self._over.is_set():
            await self._claim.confirm()
            if not self._leaving:
                self._publisher.check_head()
            # Looked first: what it then says is no older than what others see of the run.
            overdue = await self._watch.look(leaving=self._leaving)
            peer = Peer(NAME, "trainer", host_name(), os.getpid(), True, self._state())
            await self._port.heartbeat(peer, LEASE_S)
            self._progress.note("clock", **await clock.offset(self._port.now_ms))
            self._contact = time.monotonic()
            await self._intake.give_up(overdue)
            await self._look_at_lines()
            await wait_for(self._over, LEASE_S / 4)

    async def obey(self) -> None:
        """Leaves when it is ordered to; tells `train` of rollbacks."""
        after = "$"
        while not self._over.is_set():
            for order in await self._port.orders(after, self._block_ms):
                after = order.order_id
                if order.kind == "stop" and order.target in ("", NAME):
                    self._service.stop(order.reason or "a stop order")
                elif order.kind == "rollback":
                    self._rollbacks.order(order)

    async def in_line(self) -> None:
        """Keeps the place in the line for the device, where it is one that engines use, too."""
        if self._device is None:
            await self._over.wait()
        else:
            await self._device.follow(self._over)

    async def heed(self) -> None:
        """Ends all once another rank cannot go on."""
        while not self._over.is_set():
            if self._ranks.failure:
                raise ServiceError(self._ranks.failure)
            await wait_for(self._over, PERIOD_S)

    async def hasten(self) -> None:
        """A trainer that is to leave does not wait long for a broker that is away."""
        while not self._over.is_set():
            if self._service.stopping.is_set():
                self._port.hasten()
                return
            await wait_for(self._service.stopping, self._block_ms / 1000)

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

    # -- what it says of itself

    async def _look_at_lines(self) -> None:
        self._progress.flush()
        await self._evaluations.flush()
        if trouble := self._progress.trouble or self._evaluations.trouble:
            self._troubles.begin("lines", trouble)
        else:
            self._troubles.end("lines")
        self._look_at_logs()

    def _look_at_logs(self) -> None:
        if trouble := self._progress.logs_trouble:
            self._troubles.begin("logs", trouble)

    def _state(self) -> dict[str, Any]:
        return {
            "version": str(self._books.version),
            "step": self._books.formed,
            "phase": self._lane.phase,
            "troubles": self._troubles.shown(),
            "missing_groups": self._intake.missing,
            "missing_evaluations": self._evaluations.missing,
            "evaluations": self._evaluations.shown(),
            "retained_bytes": self._books.retained.nbytes,
            "mended": self._port.mended,
            "answers": dict(self._rollbacks.answers),
            "event_loop_lag_s": round(self._service.event_loop_lag_s, 4),
            "metrics_url": self.metrics_url,
            "seconds": {phase: round(spent, 3) for phase, spent in self._lane.seconds().items()},
            **self._progress.figures,
        }
