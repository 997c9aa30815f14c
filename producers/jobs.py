"""The jobs of a producer: each plays one task that it holds, from when it is taken until its group is published.

A job waits for a version that its task may start on (`committed`; training tasks that evaluations would keep waiting
are given back), until its environment's scores are not behind any
more (`let_in`), for its completions, for its scores, and for the broker's answer to its publish. It ends by the task's
deadline, by `lose`, by `stop_stragglers`, or after `drain`.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass, field, replace

from broker.api import ProducerPort, Published
from broker.messages import Group, Task, TaskDelivery
from headrace.config import Config
from headrace.errors import BrokerUnavailable, Refused
from headrace.version import PolicyVersion
from producers.backlog import Load, Loads, flows, loads_of, must_hold_back, room, to_begin
from producers.capacity import Capacity
from producers.gauges import Gauges
from producers.group import Stage, failed_group, play_group
from producers.holding import Held, may_start, phase
from producers.in_play import InPlay
from producers.stragglers import reason, stragglers
from producers.visits import outlives, pressing, stays, visit
from weightsync.commits import Commit

log = logging.getLogger(__name__)

AGAIN_S = 0.25
"""Between two tries to publish while the producer leaves; before that, the port itself waits for the broker."""


class _Elsewhere(Exception):
    """Other producers can begin this task before this one can."""


@dataclass(slots=True)
class Jobs:
    """All jobs of one producer. `changed` is set whenever a rollout, a group or the version moves on."""

    name: str
    port: ProducerPort
    stage: Stage
    config: Config
    gauges: Gauges
    leaving: asyncio.Event
    held: dict[str, Held] = field(default_factory=dict)
    """By entry id; at most `capacity.most_held`, and as many that were lost, for a quarter of a lease."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    committed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set, and replaced by a new one, at each commit."""
    head: PolicyVersion | None = None
    """The newest version there is, in the engine or not."""
    newest: PolicyVersion | None = None
    """The newest version that was ever committed."""
    visiting: bool = False
    """The engine went back to an earlier one for an evaluation."""
    shut: bool = False
    """A task was given back: none is taken before the next commit."""
    leaving_version: bool = False
    """The engine is about to leave its version: nothing begins that must end on it."""
    outage: str = ""
    """Why calls to the broker wait; empty while it answers."""
    _drained: bool = False

    @property
    def capacity(self) -> Capacity:
        environments = sum(environment.weight > 0 for environment in self.config.environments)
        return Capacity(self.stage.player.engine.slots, self.config.trainer.group_size, environments)

    @property
    def version(self) -> PolicyVersion | None:
        return self.stage.player.engine.version

    @property
    def entry_ids(self) -> list[str]:
        """Of all that is held."""
        return [one.entry_id for held in self.held.values() for one in (*held.earlier, held.delivery)]

    @property
    def _loads(self) -> Loads:
        return loads_of(self.held.values())

    def room(self) -> int:
        return 0 if self.shut else room(self.held.values(), self.version, self.capacity)

    def phase(self) -> str:
        return phase(self.held.values(), self.version, bool(self.outage))

    def on_wait_for_device(self, waits: bool) -> None:
        """The engine waits for its device, or has it: called by the turns that it takes."""
        self.gauges.without_device = waits
        self._tell_phase()

    def tell_backlog(self) -> None:
        """How far the scores of each environment are behind, as metrics."""
        loads = self._loads
        for environment in self.config.environments:
            load = loads.get(environment.called, Load())
            self.gauges.backlog(environment.called, load.unscored, load.held_back)

    def moved(self) -> None:
        """Something moved on. Whoever takes tasks looks at it."""
        self._tell_phase()
        for held in to_begin(self.held.values(), self.capacity):
            held.held_back = False
            held.let_in.set()
        self.changed.set()

    def on_commit(self, commit: Commit) -> None:
        """A new version is in the engine: called by the receiver."""
        self.shut = self.leaving_version = False
        before = self.newest
        self.newest = commit.version if before is None else max(before, commit.version)
        self.visiting = commit.version < self.newest
        self.gauges.committed(commit, again=before == self.newest)
        self._tell_versions()
        self.stop_stragglers()
        self.moved()

    def on_head(self, head: PolicyVersion) -> None:
        """There is a newer version: called by the receiver, before it is in the engine."""
        self.head = head
        self.stop_stragglers()
        self._tell_versions()

    # -- steering (`weightsync/steering.py`)

    @property
    def pressing(self) -> bool:
        return pressing(self.held.values())

    def visit(self) -> PolicyVersion | None:
        return visit(self.held.values(), self.version, self.head)

    def leaves(self) -> bool:
        self.leaving_version = not self._stays
        return self.leaving_version

    def unavailable(self, version: PolicyVersion) -> None:
        for held in self.held.values():
            if held.evaluates and held.waits_for_version and held.delivery.task.min_version == version:
                held.unavailable = f"version {version} cannot be had here any more"
        self._tell_versions()

    def _tell_versions(self) -> None:
        """Whoever waits for a version looks again."""
        before, self.committed = self.committed, asyncio.Event()
        before.set()

    # -- what is held

    def on_outage(self, why: str) -> None:
        """Calls to the broker wait, and why; or it answers again. Called by the port."""
        self.outage = why
        self.gauges.outage(why)
        self._tell_phase()

    def _tell_phase(self) -> None:
        if not self.leaving.is_set():
            self.gauges.does(self.phase())

    def hold(self, delivery: TaskDelivery, budget_s: float) -> Held | None:
        """A task to play. None for one that plays here already, which comes again when the broker lost its tail, or
        from somebody who took it over and gave it back: its job goes on, and publishes its group as this delivery (and
        as the one before, where that was not lost: an entry may be a second one that nobody asked for).

        Another task of the same name is played beside it: the broker says which of them it waits for.
        """
        task = delivery.task
        again = next((held for held in self.held.values() if held.delivery.task == task), None)
        if again is not None:
            del self.held[again.delivery.entry_id]
            again.came_again(delivery)
            self.held[delivery.entry_id] = again
            return None
        in_play = InPlay(task.group_size, self.moved)
        held = Held(delivery, in_play, budget_s, not self._may_start(task))
        self.held[delivery.entry_id] = held
        return held

    async def play(self, held: Held) -> None:
        """One job: wait for the version, play, score, publish."""
        try:
            group = await self._group(held)
        except _Elsewhere:
            await self._give_back(held)
            return
        held.publishing = True
        # Groups that are ready at the same moment leave together: that is for the port to see.
        answer = await self._publish(held, group)
        if answer is None:
            return
        self.held.pop(held.delivery.entry_id, None)
        self.gauges.published_group(group, answer, held.in_play.sampled(self.stage.player.engine), held.in_play.at)
        self.moved()

    def lose(self, entry_ids: list[str]) -> None:
        """These tasks, and no others, are not this producer's, as its newest renewal says.

        They are others' now, or a broker that lost its tail hands them out again, which it does at once: so a job is
        ended when it is called lost for the second time, and until then `hold` may find it.
        """
        for entry_id, held in [(entry_id, held) for entry_id, held in self.held.items() if not held.publishing]:
            before = held.lost
            held.went(entry_ids)
            if held.delivery.entry_id != entry_id:
                self.held[held.delivery.entry_id] = self.held.pop(entry_id)
            if before and held.lost:
                self._end(held)
        self.moved()

    def stop_stragglers(self) -> None:
        """End what nobody can use any more, unless only its too-old tokens are left out."""
        staleness, engine = self.config.staleness, self.stage.player.engine
        if staleness.stale != "drop":
            return
        for held in stragglers(self.held.values(), engine, self.head, staleness.max_lag):
            held.in_play.stop(reason(staleness.max_lag), engine)

    async def drain(self, seconds: float) -> None:
        """Finish what plays for at most `seconds`; what has not begun is left at once."""
        for held in self.held.values():
            if held.job is not None and (held.waits_for_version or held.held_back):
                held.job.cancel()
        jobs = {held.job for held in self.held.values() if held.job is not None}
        if jobs:
            _, late = await asyncio.wait(jobs, timeout=seconds)
            self._drained = True
            for job in late:
                job.cancel()

    def forget(self) -> None:
        """What is still held was given back, or its lease runs out."""
        for held in self.held.values():
            tokens = held.in_play.sampled(self.stage.player.engine)
            self.gauges.thrown_away("given_back", tokens, held.delivery.task.task_id)
        self.held.clear()

    async def _group(self, held: Held) -> Group:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + held.budget_s
        why = f"the task's deadline passed: no version {held.delivery.task.min_version} came"
        try:
            async with asyncio.timeout_at(deadline):
                why = await self._caught_up(held)
                if not why:
                    why = "the task's deadline passed: the scores of its environment are behind"
                    # The engine may have gone elsewhere while it was held back.
                    why = await self._let_in(held) or await self._caught_up(held)
        except TimeoutError:
            held.waits_for_version = False
        if why:
            held.in_play.clear()
            return failed_group(held.delivery, self.name, why)
        held.in_play.begin()
        return await play_group(self.stage, held.delivery, held.in_play, max(0.0, deadline - loop.time()))

    def _may_start(self, task: Task) -> bool:
        """Now, in this engine: no training on a version that is only visited, no evaluation on one that it leaves."""
        if not may_start(self.version, task):
            return False
        if task.kind == "eval":
            return not self.leaving_version
        max_lag = self.config.staleness.max_lag
        return not self.visiting and not (self._stays and outlives(self.version, self.head, max_lag))

    @property
    def _stays(self) -> bool:
        return stays(self.held.values())

    async def _caught_up(self, held: Held) -> str:
        """Wait for a version that the task may start on. Why none will come; empty once it is there.

        Raises _Elsewhere for a training task that waits for evaluations.
        """
        while not self._may_start(held.delivery.task) and not held.unavailable:
            held.waits_for_version = True
            if not held.evaluates and (self.visiting or self._stays):
                raise _Elsewhere
            await self.committed.wait()
        held.waits_for_version = False
        if held.evaluates:
            self._tell_versions()
        self.moved()
        return held.unavailable

    async def _give_back(self, held: Held) -> None:
        """Every delivery of a task that others can begin sooner."""
        self.shut = held.publishing = True
        given = set[str]()
        while waiting := {one.entry_id for one in (*held.earlier, held.delivery)} - given:
            try:
                await self.port.give_back(self.name, sorted(waiting))
            except (BrokerUnavailable, Refused):
                if not self.leaving.is_set():
                    raise
                return
            given |= waiting
        self.held.pop(held.delivery.entry_id, None)
        self.gauges.event("passed_on", task=held.delivery.task.task_id)
        self.moved()

    async def _let_in(self, held: Held) -> str:
        """Hold it back while it must be. Why it never begins; empty once it may. Evaluations are never held back."""
        environment, patience_s = held.delivery.task.environment, self.config.producer.reward_deadline_s
        if held.delivery.task.kind == "eval" or not must_hold_back(environment, self._loads, self.capacity):
            return ""
        held.held_back = True
        try:
            while not held.let_in.is_set():
                with suppress(TimeoutError):
                    async with asyncio.timeout(patience_s):
                        await held.let_in.wait()
                # Where no other environment's go on, it is in nobody's way.
                if not held.let_in.is_set() and flows(self._loads, self.capacity):
                    return f"environment {environment!r} is {self.capacity.most_unscored} groups behind with its scores"
            return ""
        finally:
            held.held_back = False
            self.moved()

    async def _publish(self, held: Held, group: Group) -> Published | None:
        """The broker's answer, for every delivery of the task, the newest first; None when it is away until the drain
        is over.
        """
        answer: Published = "superseded"
        sent: list[TaskDelivery] = []
        while waiting := [one for one in (*held.earlier, held.delivery) if one not in sent]:
            delivery = waiting[-1]
            try:
                said = await self.port.publish(self.name, delivery, replace(group, attempt=delivery.attempt))
            except (BrokerUnavailable, Refused):
                # A port in haste gives up early; how long a finished group may wait is for the drain to say.
                if not self.leaving.is_set():
                    raise
                if self._drained:
                    return None
                await asyncio.sleep(AGAIN_S)
                continue
            sent.append(delivery)
            answer = said if answer == "superseded" else answer
        return answer

    def _end(self, held: Held) -> None:
        """End a job whose task is not this producer's any more."""
        self.gauges.lost(held.in_play.sampled(self.stage.player.engine), held.delivery.task.task_id)
        self.gauges.event("lost", task=held.delivery.task.task_id)
        self.held.pop(held.delivery.entry_id, None)
        if held.job is not None:
            held.job.cancel()
        self.moved()
