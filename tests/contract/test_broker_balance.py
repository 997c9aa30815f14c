"""Whatever happens in whatever order, the sheet closes after each step, and both brokers agree on everything."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from broker.api import Fence, Hello, Peer, RunRecord
from broker.connect import Run, connect_run, connect_runs
from broker.looks import DeadLetter
from broker.messages import SCHEMA, GroupDelivery, StepEntry, TaskDelivery, Verdict
from headrace.config import BrokerConfig
from headrace.errors import Fenced, Refused
from tests.reigns import reign
from tests.support import make_group, make_task

CONFIG = BrokerConfig(stream_block_ms=500, connect_timeout_s=5.0, max_deliveries=2)
PRODUCERS = ("p0", "p1", "p2")
VERDICTS: tuple[Verdict, ...] = ("trained", "stale", "filtered", "failed", "superseded", "lost")
_numbers = itertools.count()

STEPS = st.one_of(
    st.tuples(st.just("admit"), st.integers(1, 3), st.sampled_from(["train", "eval"])),
    st.tuples(st.just("admit_again"), st.integers(0, 9)),
    st.tuples(st.just("admit_late"), st.just(0)),
    st.tuples(st.just("take"), st.sampled_from(PRODUCERS), st.integers(1, 3)),
    st.tuples(st.just("die"), st.sampled_from(PRODUCERS)),
    st.tuples(st.just("rejoin"), st.sampled_from(PRODUCERS)),
    st.tuples(st.just("renew"), st.sampled_from(PRODUCERS)),
    st.tuples(st.just("publish"), st.integers(0, 9), st.booleans()),
    st.tuples(st.just("give_back"), st.integers(0, 9)),
    st.tuples(st.just("take_groups"), st.integers(1, 4)),
    st.tuples(st.just("settle"), st.integers(0, 9), st.sampled_from(VERDICTS)),
    st.tuples(st.just("settle_task"), st.integers(0, 9)),
    st.tuples(st.just("new_trainer"), st.booleans()),
    st.tuples(st.just("zombie"), st.integers(0, 9)),
    st.tuples(st.just("replay"), st.integers(0, 9)),
    st.tuples(st.just("drop"), st.integers(0, 9)),
)


@dataclass
class Walk:
    """One broker and everything that anybody ever held of it: steps pick from the past, too."""

    run: Run
    record: RunRecord
    log: list[Any] = field(default_factory=list)
    """What was observed; ids of entries are the broker's own business and stay out."""
    fences: list[Fence] = field(default_factory=list)
    tasks: list[str] = field(default_factory=list)
    held: list[tuple[str, TaskDelivery]] = field(default_factory=list)
    groups: list[GroupDelivery] = field(default_factory=list)

    async def start(self) -> None:
        self.fences.append(await reign(self.run))

    async def step(self, name: str, *args: Any) -> None:
        await getattr(self, name)(*args)
        sheets = await self.run.balance()
        assert all(sheet.closed for sheet in sheets), (name, args, sheets)
        depths = await self.run.depths()
        waiting = depths.tasks_waiting + depths.tasks_held + depths.groups_waiting + depths.groups_held
        assert waiting == sum(sheet.outstanding for sheet in sheets)
        self.log.append((name, args, sheets, depths))

    async def admit(self, count: int, kind: str) -> None:
        tasks = [make_task(f"{kind}-{len(self.tasks) + n}", kind=kind) for n in range(count)]
        self.tasks += [task.task_id for task in tasks]
        await self.run.admit(self.fences[-1], tasks)

    async def admit_again(self, which: int) -> None:
        if self.tasks:
            name = pick(self.tasks, which)
            await self.run.admit(self.fences[-1], [make_task(name, kind=name.partition("-")[0])])

    async def admit_late(self, _: int) -> None:
        self.tasks.append(f"train-{len(self.tasks)}")
        await self.run.admit(self.fences[-1], [make_task(self.tasks[-1], deadline_ms=1)])

    async def take(self, producer: str, count: int) -> None:
        await self.run.heartbeat(Peer(producer, "producer", "host", 1, True, {}), 60.0)
        taken = await self.run.take(producer, count, 0)
        self.held += [(producer, delivery) for delivery in taken]
        self.log.append([(delivery.task, delivery.attempt) for delivery in taken])

    async def die(self, producer: str) -> None:
        await self.run.retire(producer)

    async def rejoin(self, producer: str) -> None:
        await self.run.join(Hello(producer, SCHEMA, self.record.digests, "host", 1))

    async def renew(self, producer: str) -> None:
        ids = {delivery.entry_id: delivery for name, delivery in self.held if name == producer}
        lost = await self.run.renew(producer, list(ids))
        self.log.append(sorted((ids[one].task.task_id, ids[one].attempt) for one in set(lost)))

    async def publish(self, which: int, sound: bool) -> None:
        if self.held:
            producer, delivery = pick(self.held, which)
            group = make_group(delivery.task, delivery.attempt, producer, vocab=100 if sound else 9000)
            self.log.append(await self.run.publish(producer, delivery, group))

    async def give_back(self, which: int) -> None:
        if self.held:
            producer, delivery = pick(self.held, which)
            await self.run.give_back(producer, [delivery.entry_id])

    async def take_groups(self, count: int) -> None:
        taken = await self.run.take_groups(self.fences[-1], count, 0)
        self.groups += taken
        self.log.append([(one.group.task_id, one.group.attempt, one.group.error) for one in taken])

    async def settle(self, which: int, verdict: Verdict) -> None:
        if self.groups:
            chosen = pick(self.groups, which)
            entry = StepEntry(chosen.entry_id, chosen.group.task_id, verdict, "why" if verdict == "stale" else "")
            await self.run.settle(self.fences[-1], [entry, entry])

    async def settle_task(self, which: int) -> None:
        if self.tasks:
            await self.run.settle(self.fences[-1], [StepEntry("", pick(self.tasks, which), "lost", "gone")])

    async def new_trainer(self, reads: bool) -> None:
        self.fences.append(await reign(self.run))
        if reads:
            opened = await self.run.open_groups(self.fences[-1])
            self.groups += opened
            self.log.append([(one.group.task_id, one.group.attempt) for one in opened])

    async def zombie(self, which: int) -> None:
        old = pick(self.fences, which)
        if old is self.fences[-1]:
            return
        with pytest.raises(Fenced):
            await self.run.admit(old, [make_task("never")])
        if self.groups:
            chosen = pick(self.groups, which)
            with pytest.raises(Fenced):
                await self.run.settle(old, [StepEntry(chosen.entry_id, chosen.group.task_id, "trained")])

    async def replay(self, which: int) -> None:
        letters = await self.letters()
        if letters:
            try:
                await self.run.replay_dead(pick(letters, which).letter_id)
            except Refused as error:
                self.log.append(re.sub("'.*?'", "it", str(error)))

    async def drop(self, which: int) -> None:
        letters = await self.letters()
        if letters:
            assert await self.run.drop_dead([pick(letters, which).letter_id]) == 1

    async def letters(self) -> list[DeadLetter]:
        letters = await self.run.dead("", 99)
        self.log.append([replace(letter, letter_id="") for letter in letters])
        return letters


def pick(past: list[Any], which: int) -> Any:
    """Recent things more often than old ones."""
    return past[-1 - which % len(past)]


async def walk(url: str, record: RunRecord, steps: list[tuple[Any, ...]]) -> list[Any]:
    runs = connect_runs(url, CONFIG)
    await runs.create(record)
    run = connect_run(url, record.run_id, CONFIG)
    try:
        walker = Walk(run, record)
        await walker.start()
        for name, *args in steps:
            await walker.step(name, *args)
        return walker.log
    finally:
        await run.close()
        await runs.delete(record.run_id)
        await runs.close()


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(STEPS, min_size=5, max_size=40))
def test_the_sheet_closes_and_the_brokers_agree(
    redis_url: str, record: RunRecord, steps: list[tuple[Any, ...]]
) -> None:
    record = replace(record, run_id=f"walk-{next(_numbers)}")

    async def both() -> None:
        in_memory = await walk(f"memory:{record.run_id}", record, steps)
        on_redis = await walk(redis_url, record, steps)
        assert in_memory == on_redis

    run_in_loop(both)


def run_in_loop(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner() as runner:
        runner.run(main())
