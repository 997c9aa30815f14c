"""`headrace up`: one local run from its first process to its last.

Wait graph
    run         waits for the loops below; then says its last words to the broker and stops Redis
    supervise   waits for the supervisor (trainer ended, or a part is beyond repair) or for `stopping` (a signal or
                a stop order); then for the processes to leave, at most their time;
                ends every other loop
    orders      waits for the broker's orders, one block time at most
    pulse       waits a second between heartbeats; marks parts as joined and answers orders
    guard       waits a second between two looks; where the broker's calls wait and no trainer has joined, it asks
                whether Redis has lost the run
    watch       waits a quarter of a second between two looks at the trainer's step file; redraws the screen, also with
                how long the broker has left `pulse` without an answer

A broker that is away is waited for as every service waits (`broker.outage_s`): nobody is ended for it meanwhile, and
who has died is started again once it is back. Only a launcher that is stopping gives it up soon.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from broker.api import OperatorPort, Order, Peer, Runs
from deploy.cores import Cores, has_gpu
from deploy.events import NAME, Events
from deploy.outage import Outage
from deploy.parts import Services
from deploy.plan import Plan
from deploy.progress import Follower, newest_step, step_line
from deploy.redis_server import RedisServer
from deploy.registrar import Registrar
from deploy.report import sheet_fields
from deploy.restarts import LIMITS
from deploy.roll_call import RollCall
from deploy.scaling import JOIN_S, Scaling, surplus
from deploy.screen import RunView, Screen
from deploy.supervisor import Part, Supervisor, Verdict
from headrace.errors import BrokerError, BrokerUnavailable, Refused, ServiceError, WeightError
from headrace.files import write_json
from headrace.service import Service
from weightsync.arena import Arena

log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
LEASE_S = 10.0
REDRAW_S = 0.25
QUICK_S = 3.0
"""How long services may take to leave when there is nothing left to save."""
TRAINER_S = 125.0
"""How long the trainer may take for its step and checkpoint; a little longer than it allows itself."""
GRACE_S = 15.0
"""Beyond a producer's own drain time."""
WEIGHTS_S = 5.0
"""Beyond what it waits for a broker that is away."""
REDIS_S = 10.0


@dataclass(slots=True)
class Outcome:
    """How the run ended on this machine."""

    code: int = 1
    reason: str = ""
    wall_s: float = 0.0
    killed: list[str] = field(default_factory=list)
    balance: dict[str, Any] = field(default_factory=dict)


class Launcher:
    """The parts of one run and the loops over them."""

    def __init__(self, plan: Plan, url: str, redis: RedisServer | None, screen: Screen) -> None:
        self.outcome = Outcome()
        self._plan = plan
        self._url = url
        self._redis = redis
        self._screen = screen
        self._events = Events(screen, plan.folder.path / "launcher.jsonl")
        self._report = self._events.report
        self._services = Services(
            plan.config,
            plan.folder,
            url,
            Cores.for_run(plan.config, os.sched_getaffinity(0), gpu=has_gpu()),
            plan.resume,
        )
        self._supervisor: Supervisor | None = None
        self._started = time.monotonic()
        # Without a folder for weights nothing can run: that is said before anything does.
        self._arena = Arena(run_folder=plan.folder.path)
        self._outage = Outage(plan.config.broker.connect_timeout_s, plan.config.broker.outage_s)
        self._roll_call = RollCall(plan.config, self._report)
        self._scalings: list[Scaling] = []
        self._answers: dict[str, str] = {}
        self._follower = Follower(plan.folder.steps_file, from_end=plan.resume)
        self._step = newest_step(plan.folder.steps_file) or 0
        self._state = "starting"
        self._told_to_stop = ""

    async def start(self, service: Service, runs: Runs, operator: OperatorPort) -> None:
        """Write the run's record, start its parts, and add the loops."""
        self._service, self._operator = service, operator
        operator.watch(self._outage.heard)
        self._forget_end()
        self._registrar = Registrar(self._plan, runs, operator)
        await self._registrar.register()
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, service.stop, "SIGHUP")
        self._supervisor = Supervisor(self._report, self._judge, self._outage, self._events.exited)
        self._started = time.monotonic()
        if self._redis is not None:
            server = self._redis
            self._supervisor.add(Part("redis", "redis", lambda _: server.spawn(), LIMITS["redis"], server.child))
        for role in ("weights", "trainer", *["producer"] * self._plan.config.producer.count):
            self._supervisor.add(self._services.part(role))
        self._state = "running"
        service.add("launcher", self._run)

    def abandon(self) -> None:
        """Whatever happened: no process is left, and no segment of theirs. Redis is its owner's to stop."""
        if self._supervisor is not None:
            self._supervisor.kill_all(spare=("redis",))
        try:
            self._arena.sweep(self._plan.folder.run_id)
        except WeightError as error:
            log.warning("segments of this run may be left: %s", error)
        self._events.close()

    def _forget_end(self) -> None:
        """The run has not ended yet, whatever an earlier start wrote."""
        for change in self._plan.changes:
            self._report("run", "changed", change)
        self._plan.folder.forget_end()

    # -- loops

    async def _run(self) -> None:
        assert self._supervisor is not None
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._watch(), name="watch")
                group.create_task(self._listening(self._pulse), name="pulse")
                group.create_task(self._listening(self._guard), name="guard")
                orders = group.create_task(self._listening(self._orders), name="orders")
                await self._supervise()
                # It may block for a while yet, and nobody obeys any more.
                orders.cancel()
        except asyncio.CancelledError:
            # A second Ctrl-C: nothing is waited for any more.
            self._supervisor.kill_all(spare=("redis",))
            raise
        except BaseExceptionGroup as errors:
            await self._leave(QUICK_S)
            await self._note_failure(errors)
            raise
        else:
            await self._last_words()
        finally:
            await self._registrar.close()
            await self._operator.close()
            await self._supervisor.stop(("redis",), REDIS_S)
            await self._supervisor.close()

    async def _supervise(self) -> None:
        assert self._supervisor is not None
        over = asyncio.ensure_future(self._supervisor.run())
        stopping = asyncio.ensure_future(self._service.stopping.wait())
        try:
            await asyncio.wait({over, stopping}, return_when=asyncio.FIRST_COMPLETED)
            self.outcome.wall_s = time.monotonic() - self._started
            if over.done():
                over.result()
                self.outcome.code, self.outcome.reason = 0, "finished"
                await self._leave(QUICK_S)
            else:
                self._operator.hasten()
                self.outcome.code = 0 if self._told_to_stop else 130
                self.outcome.reason = f"stopped: {self._told_to_stop or 'interrupted'}"
                await self._leave(TRAINER_S, self._plan.config.producer.drain_s + GRACE_S)
        finally:
            # The other loops look at the flag, because a cancellation can get lost inside the broker's client.
            self._service.stop(self.outcome.reason or "a part is beyond repair")
            over.cancel()
            stopping.cancel()

    async def _listening(self, loop: Callable[[], Awaitable[None]]) -> None:
        """A loop that asks the broker; at the end of the run one that is away is no failure any more."""
        try:
            await loop()
        except BrokerError as error:
            if not self._service.stopping.is_set():
                raise
            log.warning("not asked any more: %s", error)

    async def _orders(self) -> None:
        after = "0-0"
        # What was ordered before this launcher came is not its business.
        while old := await self._operator.orders(after, 1):
            after = old[-1].order_id
        while not self._service.stopping.is_set():
            for order in await self._operator.orders(after, self._plan.config.broker.stream_block_ms):
                after = order.order_id
                self._obey(order)

    async def _pulse(self) -> None:
        stopped = False
        while not stopped:
            with self._outage.asking():
                peers = await self._operator.peers()
            assert self._supervisor is not None
            self._roll_call.call(self._supervisor.parts.values(), peers, HEARTBEAT_S)
            self._answer_orders()
            with self._outage.asking():
                await self._heartbeat()
            stopped = await self._service.sleep(HEARTBEAT_S)

    async def _guard(self) -> None:
        while not await self._service.sleep(HEARTBEAT_S):
            assert self._supervisor is not None
            trainer = self._supervisor.parts.get("trainer")
            # Where it was deleted by hand no call waits: each is refused at once.
            if self._outage.why and trainer is not None and not (trainer.running and trainer.joined):
                # Away again, or put back by somebody else: the next look tells.
                with contextlib.suppress(BrokerUnavailable, Refused):
                    await self._regain(trainer)

    async def _regain(self, trainer: Part) -> None:
        """Put the run back where Redis lost it: a trainer that has joined does so itself, from what it knows."""
        if not await self._registrar.lost():
            return
        if trainer.running and trainer.child is not None:
            self._report(trainer.name, "stuck", "Redis lost the run before it had joined; it is started again")
            trainer.child.kill()
            return
        self._outage.emptied()
        await self._registrar.put_back()
        self._report("run", "put back", "Redis had lost it, and what was under way with it: no trainer was there")

    async def _watch(self) -> None:
        stopped = False
        while not stopped:
            stopped = await self._service.sleep(REDRAW_S)
            self._show_steps()
            if news := self._outage.news():
                self._report("broker", *news)
            self._screen.show(self._view())

    def _show_steps(self) -> None:
        for fields in self._follower.read():
            self._step = int(fields.get("step", self._step))
            self._screen.line(step_line(fields, self._plan.config.run.steps))

    # -- orders

    def _obey(self, order: Order) -> None:
        assert self._supervisor is not None
        if order.kind == "stop" and order.target in ("", NAME):
            self._told_to_stop = order.reason or "ordered"
            self._service.stop("a stop order")
        if order.kind != "scale" or order.target not in ("", "producer"):
            return
        producers = self._supervisor.of_role("producer")
        drained = surplus(producers, order.count)
        started = [self._services.part("producer") for _ in range(order.count - len(producers))]
        for part in drained:
            self._supervisor.drain(part)
        for part in started:
            self._supervisor.add(part)
        patience = self._plan.config.producer.drain_s + GRACE_S if drained else JOIN_S
        self._scalings.append(Scaling(order.reason, order.count, started, drained, time.monotonic() + patience))

    def _answer_orders(self) -> None:
        assert self._supervisor is not None
        now = time.monotonic()
        for scaling in list(self._scalings):
            answer = scaling.answer(self._supervisor.parts, now)
            if answer is None:
                continue
            for part in scaling.drained:
                if part.child is not None and now >= scaling.deadline:
                    part.child.kill()
                self._services.cores.give_back(part.name)
            self._scalings.remove(scaling)
            self._report("producers", "scaled", answer)
            # Only the newest answers are kept: their senders read them within seconds.
            self._answers = dict([*self._answers.items(), (scaling.token, answer)][-8:])

    # -- what is known about parts

    async def _heartbeat(self) -> None:
        assert self._supervisor is not None
        state = {
            "producers": len(self._supervisor.of_role("producer")),
            "restarts": dict(self._supervisor.restarts),
            "answers": dict(self._answers),
        }
        peer = Peer(NAME, "launcher", socket.gethostname(), os.getpid(), True, state)
        await self._operator.heartbeat(peer, LEASE_S)

    async def _judge(self, part: Part, code: int) -> Verdict:
        """A service that left by itself was right to when its run is over, or about to be.

        Raises ServiceError with the reason where its trainer has ended the run as failed.
        """
        if code != 0 and part.role != "trainer":
            return "died"
        if code == 0 and self._service.stopping.is_set():
            return "over"
        state = await self._operator.state()
        if state.status == "failed" and part.role == "trainer":
            self._report(part.name, "ended", "it has ended the run as failed")
            raise ServiceError(state.reason or "the trainer has ended the run without a reason")
        return "over" if code == 0 and state.status != "running" else "died"

    def _view(self) -> RunView:
        assert self._supervisor is not None
        away = self._outage.seconds
        why = self._outage.why or "no answer from Redis"
        state = f"{self._state}, {why} for {away:.0f} s" if away else self._state
        parts = self._roll_call.views(self._supervisor.parts.values())
        return RunView(self._plan.folder.run_id, state, self._step, self._plan.config.run.steps, parts)

    # -- the end

    async def _leave(self, trainer_s: float, producers_s: float | None = None) -> None:
        """Producers and trainer first, each with what it has to save; then the weights that they read."""
        assert self._supervisor is not None
        self._state = "stopping"
        self._screen.show(self._view())
        for late in await asyncio.gather(
            self._supervisor.stop(("producer",), trainer_s if producers_s is None else producers_s),
            self._supervisor.stop(("trainer",), trainer_s),
        ):
            self.outcome.killed += late
        # A trainer that was told to leave finishes its step first.
        self._show_steps()
        patience_s = WEIGHTS_S + self._plan.config.broker.connect_timeout_s
        self.outcome.killed += await self._supervisor.stop(("weights",), patience_s)

    async def _note_failure(self, errors: BaseExceptionGroup[BaseException]) -> None:
        """Tell the broker; when it is what broke, the run's reason stays the first one."""
        self.outcome.reason = str(errors.exceptions[0]).splitlines()[0].rstrip(":")
        self._operator.hasten()
        try:
            await self._operator.set_status("failed", self.outcome.reason)
            await self._operator.retire(NAME)
        except BrokerError as error:
            self._report(NAME, "could not note the failure", str(error))

    async def _last_words(self) -> None:
        """The balance for the summary; where the run was only stopped, how it can go on."""
        self._operator.hasten()
        try:
            if self.outcome.reason != "finished":
                await self._operator.set_status("stopping", f"{self.outcome.reason}; `headrace up --resume` goes on")
            self.outcome.balance = {sheet.kind: sheet_fields(sheet) for sheet in await self._operator.balance()}
            await self._operator.retire(NAME)
        except BrokerError as error:
            # Everything is done and saved; that Redis does not know it yet is put right by whoever goes on.
            self._report(NAME, "could not say goodbye", str(error))

    def summarize(self) -> dict[str, Any] | None:
        """The trainer's summary with what only the launcher knows, written back; None when there is none."""
        folder = self._plan.folder
        summary = folder.read_json(folder.summary_file)
        if summary is None:
            return None
        summary["wall_s"] = round(self.outcome.wall_s, 1)
        summary["balance"] = self.outcome.balance or summary.get("balance")
        write_json(folder.summary_file, summary)
        return summary
