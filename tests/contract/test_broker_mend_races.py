"""A repair of the run while another call of the same trainer is on its way: both are counted, neither twice."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from broker.api import RunRecord
from broker.codec import encode_task
from broker.keys import Keys
from broker.redis.scripts import scripts
from tests.servers import RedisProcess
from tests.sites import PATIENT, Site
from tests.support import make_task


@pytest.fixture
async def site(redis_process: Callable[..., RedisProcess], record: RunRecord) -> AsyncIterator[Site]:
    site = await Site(redis_process(*PATIENT), record).begin()
    yield site
    await site.close()


@pytest.mark.parametrize("moment", ["before its answer", "before the repair"])
async def test_an_admission_between_look_and_repair_counts_once(
    moment: str, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    await site.admit(*"ab")
    with site.admin() as client:
        # As if Redis had lost one count.
        client.hset(Keys(site.record.run_id).of("sheet"), "train admitted", 1)
    link, mirror, once, task = site.trainer._link, site.trainer._mender.mirror, site.trainer._link.once, make_task("c")
    before = scripts()["look" if moment == "before its answer" else "repair_sheet"].sha
    late = [task]

    async def with_admission(command: tuple[Any, ...]) -> Any:
        if command[1] != before or not late:
            return await once(command)
        late.clear()
        found = await once(command) if moment == "before its answer" else None
        mirror.ask([(task, encode_task(task))])
        await once(link.evalsha("admit", "", "c", "train", encode_task(task), fence=site.fence))
        found = found or await once(command)
        mirror.admitted(["c"], set())
        return found

    monkeypatch.setattr(link, "once", with_admission)
    link.connection.epoch += 1
    await site.beat()
    assert not late
    (sheet,) = await site.operator.balance()
    assert (sheet.admitted, sheet.outstanding, sheet.verdicts) == (3, 3, {})


@pytest.mark.parametrize("torn", ["admission", "giving back"])
async def test_what_half_a_transaction_left_of_a_task_is_not_played(torn: str, site: Site) -> None:
    """Redis 6.2 and 7.0 make the beginning of a transaction whose end their file lost: an entry that no task names."""
    await site.admit(*"ab")
    keys = Keys(site.record.run_id)
    with site.admin() as client:
        (first, fields), _ = client.xrange(keys.of("tasks"))
        stray = client.xadd(keys.of("tasks"), fields)
        if torn == "giving back":
            client.xdel(keys.of("tasks"), first)
    site.trainer._link.connection.epoch += 1
    await site.beat()
    with site.admin() as client:
        assert stray not in dict(client.xrange(keys.of("tasks")))
    assert sorted(await site.play(9)) == ["a", "b"]
    assert (await site.finish()).verdicts == {"trained": 2, **({"lost": 1} if torn == "giving back" else {})}


async def test_an_entry_that_names_no_task_is_left_to_who_takes_it(site: Site) -> None:
    """It goes to `dead` with its bytes."""
    with site.admin() as client:
        client.xadd(Keys(site.record.run_id).of("tasks"), {"foreign": "bytes"})
    site.trainer._link.connection.epoch += 1
    await site.beat()
    assert await site.take(1) == []
    assert len(await site.operator.dead("", 9)) == 1
