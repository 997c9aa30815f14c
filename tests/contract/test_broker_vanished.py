"""A run that vanished is put back once, however many calls find it so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from broker.api import RunRecord
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
