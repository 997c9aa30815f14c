"""Whatever happens before and after, a Redis that loses some of its newest writes ends with a sheet that closes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from broker.api import RunRecord
from broker.messages import Verdict
from headrace.errors import Refused
from tests.servers import RedisProcess
from tests.sites import PATIENT, Site
from tests.support import make_group

_numbers = itertools.count()
VERDICTS: tuple[Verdict, ...] = ("trained", "stale", "filtered", "failed")
PRODUCERS = ("p0", "p1")

WORK = st.one_of(
    st.tuples(st.just("admit"), st.integers(1, 3)),
    st.tuples(st.just("take"), st.sampled_from(PRODUCERS), st.integers(1, 3)),
    st.tuples(st.just("play"), st.sampled_from(PRODUCERS)),
    st.tuples(st.just("spoil"), st.sampled_from(PRODUCERS)),
    st.tuples(st.just("give_back"), st.sampled_from(PRODUCERS)),
    st.tuples(st.just("die"), st.sampled_from(PRODUCERS)),
    st.tuples(st.just("receive"), st.integers(1, 3)),
    st.tuples(st.just("settle"), st.integers(0, 9), st.sampled_from(VERDICTS)),
    st.tuples(st.just("replay"), st.integers(0, 9)),
)
LOSS = st.one_of(
    st.tuples(st.just("restart"), st.floats(0.0, 1.0)),
    st.tuples(st.just("restart"), st.floats(0.8, 1.0)),
    st.tuples(st.just("empty")),
)
STEPS = st.lists(st.one_of(WORK, WORK, WORK, LOSS), min_size=6, max_size=30)


@dataclass
class Walk:
    """Steps on a site; what the trainer was told of itself counts as dead or lost beside its own verdicts."""

    site: Site
    began: int
    """Where the append-only file was when Redis was started last."""

    async def admit(self, count: int) -> None:
        first = len(self.site.tasks)
        await self.site.admit(*(f"t{first + number}" for number in range(count)))

    async def take(self, name: str, count: int) -> None:
        await self.site.beat()
        await self.site.take(count, name)

    async def play(self, name: str) -> None:
        await self.site.beat()
        await self.site.play(0, name)

    async def spoil(self, name: str) -> None:
        """Publish groups that the trainer will refuse."""
        await self.site.beat()
        producer = await self.site.producer(name)
        for delivery in self.site.in_play.pop(name, {}).values():
            await producer.publish(name, delivery, make_group(delivery.task, delivery.attempt, name, vocab=9000))

    async def give_back(self, name: str) -> None:
        await self.site.beat()
        await (await self.site.producer(name)).give_back(name, list(self.site.in_play.pop(name, {})))

    async def die(self, name: str) -> None:
        await self.site.beat()
        await self.site.die(name)

    async def receive(self, count: int) -> None:
        await self.site.receive(count)

    async def settle(self, which: int, verdict: Verdict) -> None:
        if self.site.held:
            name = sorted(self.site.held)[which % len(self.site.held)]
            await self.site.settle(name, verdict=verdict)

    async def replay(self, which: int) -> None:
        await self.site.beat()
        letters = await self.site.operator.dead("", 9)
        if letters:
            # Its task may be outstanding again.
            with contextlib.suppress(Refused):
                await self.site.operator.replay_dead(letters[which % len(letters)].letter_id)

    async def restart(self, kept: float) -> None:
        end = self.site.size()
        await self.site.restart(self.began + round(kept * (end - self.began)))
        self.began = self.site.size()

    async def empty(self) -> None:
        self.site.empty()


async def walk(server: RedisProcess, record: RunRecord, steps: list[tuple[Any, ...]]) -> None:
    site = await Site(server, record).begin()
    walker = Walk(site, began=site.size())
    try:
        for name, *args in steps:
            await getattr(walker, name)(*args)
        sheet = await site.finish()
        assert sheet.admitted >= len(set(site.tasks))
        assert Counter(site.trained).keys() <= set(site.tasks)
    finally:
        await site.runs.delete(record.run_id)
        await site.close()


@pytest.fixture
def servers(redis_process: Callable[..., RedisProcess]) -> Callable[[], RedisProcess]:
    """One that all examples share, in turn."""
    started: list[RedisProcess] = []

    def one() -> RedisProcess:
        if not started:
            started.append(redis_process(*PATIENT))
        return started[0]

    return one


# Without shrinking: each example starts Redis again and again.
@settings(
    max_examples=20,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(steps=STEPS)
@example(  # The middle one tears the transaction that admits on Redis 7.0.
    steps=[
        *(("admit", 3), ("play", "p0"), ("admit", 2), ("restart", 0.215), ("give_back", "p0")),
        *(("restart", 0.889), ("restart", 0.926), ("admit", 3), ("play", "p1")),
    ]
)
def test_the_sheet_closes_whatever_is_lost(
    servers: Callable[[], RedisProcess], record: RunRecord, steps: list[tuple[Any, ...]]
) -> None:
    with asyncio.Runner() as runner:
        runner.run(walk(servers(), replace(record, run_id=f"loss-{next(_numbers)}"), steps))
