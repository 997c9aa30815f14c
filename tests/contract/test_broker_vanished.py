"""A run that vanished is put back once, however many calls find it so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from broker.api import RunRecord
from broker.messages import StepEntry
from tests.servers import RedisProcess
from tests.sites import PATIENT, Site
from tests.support import wait_until


@pytest.fixture
async def site(redis_process: Callable[..., RedisProcess], record: RunRecord) -> AsyncIterator[Site]:
    site = await Site(redis_process(*PATIENT), record).begin()
    yield site
    await site.close()


async def test_one_loss_that_many_calls_find_is_one(site: Site) -> None:
    await site.admit(*"ab")
    trainer = site.trainer
    with site.admin() as client:

        def blocked() -> bool:
            return b"cmd=xreadgroup" in client.execute_command("CLIENT", "LIST")

        for times in (1, 2):
            reading = asyncio.create_task(trainer.take_groups(site.fence, 1, 200))
            await wait_until(blocked, "the trainer waits")
            site.empty()
            await asyncio.gather(site.beat(), trainer.set_step(site.fence, 3), trainer.peers(), trainer.balance())
            await reading
            assert trainer.mended == times


@pytest.mark.parametrize("first", [True, False], ids=["the open one first", "the open one last"])
async def test_of_two_entries_of_a_task_that_are_settled_together_the_open_one_counts(site: Site, first: bool) -> None:
    await site.admit("a", "b")
    await site.play(2)
    await site.receive(2)
    entry = StepEntry(site.held["a"].entry_id, "a", "trained")
    other = StepEntry("1-0", "a", "stale", "an earlier one")
    trainer = site.connect()
    fence = await trainer.take_fence(0)
    both = [entry, other] if first else [other, entry]
    await trainer.settle(fence, [*both, StepEntry(site.held["b"].entry_id, "b", "trained")])
    for emptied in (False, True):
        if emptied:
            site.empty()
        (sheet,) = await trainer.balance()
        assert (sheet.closed, sheet.verdicts, sheet.reasons) == (True, {"trained": 2}, {}), emptied
