"""Redis fails, with and without loss: everybody goes on, the sheet closes, and nothing is counted twice."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from broker.api import Peer, Reign, RunRecord
from broker.keys import Keys
from broker.messages import StepEntry, StepRecord
from headrace.config import BrokerConfig
from headrace.errors import BrokerUnavailable, Fenced, Refused
from headrace.version import PolicyVersion
from tests.reigns import closed, reign
from tests.servers import ONE_SERVER, RedisProcess
from tests.sites import CONFIG, PATIENT, Site
from tests.support import make_group, make_task, wait_until

HASTY = BrokerConfig(stream_block_ms=50, connect_timeout_s=10.0, outage_s=0.3)


@pytest.fixture
async def site(redis_process: Callable[..., RedisProcess], record: RunRecord) -> AsyncIterator[Site]:
    site = await Site(redis_process(*PATIENT), record).begin()
    yield site
    await site.close()


async def test_after_a_restart_without_loss_nothing_is_lost(site: Site) -> None:
    await site.admit(*"abcd")
    await site.play(3)
    await site.receive(2)
    await site.settle("a")
    waiting = asyncio.create_task(site.trainer.take_groups(site.fence, 1, 5000))
    await site.restart()
    (arrived,) = await waiting
    site.held["c"] = arrived
    assert site.trainer.mended == 1
    assert (await site.finish()).verdicts == {"trained": 4}


async def steps(site: Site) -> dict[str, int]:
    """One of everything; where the file ended before each step."""
    places: dict[str, int] = {}

    async def step(name: str, does: Awaitable[object]) -> None:
        places[name] = site.size()
        await does

    producer = await site.producer()
    await step("admit", site.admit(*"abcd"))
    await step("play", site.play(1))
    await step("receive", site.receive(1))
    await step("settle", site.settle("a"))
    (taken,) = await producer.take("p0", 1, 0)
    await step("give back", producer.give_back("p0", [taken.entry_id]))
    await step("play more", site.play(2))
    await step("receive more", site.receive(1))
    await step("append", site.trainer.append_step(site.fence, StepRecord(PolicyVersion(1, 6), ())))
    await step("publish head", site.trainer.publish_head(site.fence, PolicyVersion(1, 6), b"six"))
    await step("set step", site.trainer.set_step(site.fence, 6))
    await step("take", site.take(1))
    places["end"] = site.size()
    return places


STEPS = (
    "admit", "play", "receive", "settle", "give back", "play more", "receive more", "append", "publish head",
    "set step", "take", "end",
)  # fmt: skip


@pytest.mark.parametrize("offset", [0, 9], ids=["whole", "torn"])
@pytest.mark.parametrize("place", STEPS)
async def test_a_tail_that_is_lost_is_counted_and_asked_again(site: Site, place: str, offset: int) -> None:
    places = await steps(site)
    assert tuple(places) == STEPS
    await site.restart(min(places[place] + offset, places["end"]))
    sheet = await site.finish()
    assert site.trainer.mended == 1
    assert sheet.admitted == 4 + sheet.verdicts.get("lost", 0)
    assert sheet.verdicts["trained"] == 4
    # Whose admission is lost is counted, but for those whose groups the trainer has or had.
    assert sheet.verdicts.get("lost", 0) == (2 if place == "admit" else 0)
    state = await site.trainer.state()
    assert (state.cursor, state.step) == (4, 6)
    assert (await site.trainer.reigns())[1] == Reign(4, 6)


async def test_what_the_trainer_has_pinned_stays_pinned_in_an_emptied_redis(site: Site) -> None:
    kept, let_go, foreign = PolicyVersion(1, 4), PolicyVersion(1, 5), PolicyVersion(1, 6)
    for version in (kept, let_go):
        await site.trainer.pin(version)
    await site.connect().pin(foreign)
    assert await site.trainer.unpin(let_go)
    site.empty()
    # Any fenced call finds that it is empty, and puts right what it lacks first.
    await site.trainer.publish_head(site.fence, PolicyVersion(1, 7), b"seven")
    assert await site.trainer.pinned() == {kept}
    assert await site.trainer.head() == PolicyVersion(1, 7)


@pytest.mark.parametrize("again", [False, True], ids=["once", "twice"])
async def test_an_emptied_redis_gets_its_run_back(site: Site, again: bool) -> None:
    await steps(site)
    site.empty()
    if again:
        await site.beat()
        await site.play(1)
        site.empty()
    sheet = await site.finish()
    assert sheet.verdicts["trained"] == 4
    assert sheet.admitted == 4 + sheet.verdicts["lost"]
    assert sheet.reasons["lost: Redis lost its newest writes"] == sheet.verdicts["lost"] >= 2
    assert site.trainer.mended >= 1 + again
    assert await site.trainer.record() == await site.connect().record()
    state = await site.trainer.state()
    assert (state.status, state.incarnation, state.step, state.cursor) == ("running", 1, 6, 4)


async def test_streams_that_were_deleted_by_hand_are_an_emptied_redis(site: Site) -> None:
    await site.admit(*"abcd")
    await site.play(2)
    await site.receive(1)
    keys = Keys(site.record.run_id)
    with site.admin() as client:
        client.delete(keys.of("tasks"), keys.of("groups"))
    await site.trainer.balance()
    sheet = await site.finish()
    assert (sheet.admitted, sheet.verdicts) == (7, {"lost": 3, "trained": 4})


async def test_services_wait_for_a_run_that_vanished(site: Site) -> None:
    await site.admit("a")
    producer, stranger = await site.producer(), site.connect(HASTY)
    hasty = site.connect(HASTY)
    await hasty.record()
    site.empty()
    with pytest.raises(BrokerUnavailable, match=r"has vanished from Redis.*gave up after \d+\.\d s"):
        await hasty.state()
    with pytest.raises(Refused, match="there is no run"):
        await stranger.state()
    waiting = asyncio.create_task(producer.state())
    taking = asyncio.create_task(producer.take("p0", 1, 20_000))
    await wait_until(lambda: not waiting.done(), "it waits")
    await site.trainer.set_step(site.fence, 2)
    assert (await waiting).step == 2
    assert [one.task.task_id for one in await taking] == ["a"]


async def test_a_run_that_was_deleted_does_not_come_back(site: Site) -> None:
    await site.admit("a")
    producer = await site.producer()
    waiting = asyncio.create_task(site.trainer.take_groups(site.fence, 1, 200))
    await site.runs.delete(site.record.run_id)
    with contextlib.suppress(Refused):
        await waiting
    for call in (site.trainer.set_step(site.fence, 2), producer.state(), site.trainer.take_groups(site.fence, 1, 10)):
        with pytest.raises(Refused, match="was deleted"):
            await call
    with site.admin() as client:
        assert [client.pttl(key) > 0 for key in client.keys("{hr:*")] == [True]
    await site.runs.create(site.record)
    assert (await site.connect().state()).step == 0


async def test_a_run_that_had_ended_comes_back_for_as_long_as_it_would_have_stayed(site: Site) -> None:
    await site.admit("a")
    await site.trainer.finish(site.fence, "finished", "done")
    site.empty()
    await site.trainer.retire("trainer")
    assert (await site.operator.state()).status == "finished"
    with site.admin() as client:
        assert [key for key in client.keys("*") if client.pttl(key) == -1] == []


@ONE_SERVER
async def test_slow_replies_are_waited_for(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("broker.redis.connection.READ_MARGIN_S", 0.1)
    run = site.connect()
    fence = await reign(run)
    await run.admit(fence, [make_task("a")])
    await run.heartbeat(Peer("p0", "producer", "host", 1, True, {}), 30.0)
    (delivery,) = await run.take("p0", 1, 0)
    with site.admin() as client:
        client.client_pause(1000)
        answers = await asyncio.gather(
            run.publish("p0", delivery, make_group(delivery.task, 1, "p0")), run.state(), run.take_groups(fence, 1, 200)
        )
        assert answers[0] in ("published", "repeated")
    arrived = answers[2] or await run.take_groups(fence, 1, 200)
    await run.settle(fence, [StepEntry(arrived[0].entry_id, "a", "trained")])
    assert await closed(run) == (1, 0, {"trained": 1})
    assert run.mended == 0


async def test_a_trainer_whose_incarnation_got_lost_has_it_again(site: Site) -> None:
    place = site.size()
    newer = site.connect()
    fence = await reign(newer)
    await newer.admit(fence, [make_task("a")])
    await site.restart(place)
    await newer.set_step(fence, 3)
    assert (await newer.state()).incarnation == 2
    with pytest.raises(Fenced, match="incarnation 2"):
        await site.trainer.set_step(site.fence, 9)
    (balance,) = await newer.balance()
    assert (balance.admitted, balance.verdicts, balance.closed) == (2, {"lost": 1}, True)


async def test_a_trainer_that_was_fenced_puts_nothing_back(site: Site) -> None:
    newer = site.connect()
    fence = await reign(newer)
    with pytest.raises(Fenced):
        await site.trainer.set_step(site.fence, 9)
    await newer.admit(fence, [make_task("a")])
    await site.restart()
    with pytest.raises(Fenced):
        await site.trainer.set_step(site.fence, 9)
    assert (await newer.state()).step == 0


async def test_a_group_whose_publish_is_lost_is_published_again(site: Site) -> None:
    await site.admit("a")
    producer = await site.producer()
    (delivery,) = await producer.take("p0", 1, 0)
    place = site.size()
    await producer.publish("p0", delivery, make_group(delivery.task, 1, "p0"))
    await site.restart(place)
    assert await producer.renew("p0", []) == []
    (again,) = await producer.take("p0", 1, 0)
    assert (again.entry_id, again.attempt) == (delivery.entry_id, 2)
    assert await producer.publish("p0", again, make_group(again.task, 2, "p0")) == "published"
    assert (await site.finish()).verdicts == {"trained": 1}


async def test_what_a_producer_plays_is_not_handed_to_it_twice(site: Site) -> None:
    await site.admit("a")
    producer = await site.producer()
    place = site.size()
    (delivery,) = await producer.take("p0", 1, 0)
    await site.restart(place)
    assert await producer.take("p0", 1, 0) == []
    assert await producer.renew("p0", [delivery.entry_id]) == []
    assert await producer.publish("p0", delivery, make_group(delivery.task, 1, "p0")) == "published"
    assert (await site.finish()).verdicts == {"trained": 1}


async def test_pending_entries_that_a_producer_does_not_know_of_come_with_its_next_take(site: Site) -> None:
    await site.admit(*"ab")
    producer = await site.producer()
    stream = Keys(site.record.run_id).of("tasks")
    with site.admin() as client:
        client.xreadgroup("producers", "p0", {stream: ">"}, count=1)
        (known,) = await producer.take("p0", 1, 0)
        assert (known.task.task_id, await producer.take("p0", 1, 0)) == ("b", [])
        assert await producer.renew("p0", [known.entry_id]) == []
    (unknown,) = await producer.take("p0", 2, 0)
    assert (unknown.task.task_id, unknown.attempt) == ("a", 2)


async def test_connections_that_are_cut_are_made_anew(site: Site) -> None:
    await site.admit("a")
    producer = await site.producer()
    taking = asyncio.create_task(site.trainer.take_groups(site.fence, 1, 20_000))
    with site.admin() as client:
        await wait_until(lambda: client.info("clients")["blocked_clients"] == 1, "the trainer waits")
        client.client_kill_filter(_type="normal", skipme=True)
        assert await site.play(1) == ["a"]
    (arrived,) = await taking
    assert (arrived.group.task_id, site.trainer.mended) == ("a", 0)
    assert (await producer.state()).status == "running"


@ONE_SERVER
async def test_a_service_that_leaves_does_not_wait_for_an_outage(site: Site) -> None:
    run = site.connect(CONFIG.model_copy(update={"connect_timeout_s": 3.0}))
    await run.record()
    site.server.kill()
    waiting = asyncio.create_task(run.state())
    await wait_until(lambda: not waiting.done(), "it waits")
    run.hasten()
    with pytest.raises(BrokerUnavailable, match=r"cannot be reached .*gave up after \d\.\d s"):
        await waiting


async def test_a_replay_of_the_operator_is_known_to_the_trainer_when_redis_fails(site: Site) -> None:
    operator = site.operator
    await site.admit(*"ab")
    producer = await site.producer()
    for delivery in await producer.take("p0", 2, 0):
        await producer.publish("p0", delivery, make_group(delivery.task, 1, "p0", vocab=5000))
    assert sorted(await site.receive(2)) == ["a", "b"]
    first, second = await operator.dead("", 2)
    await operator.replay_dead(first.letter_id)
    await site.admit("c")
    await site.play(1)
    await site.receive(2)
    await operator.replay_dead(second.letter_id)
    await site.restart()
    sheet = await site.finish()
    assert (sheet.admitted, sheet.verdicts) == (5, {"dead": 4, "trained": 1})


async def test_a_group_that_redis_and_its_trainer_lost_is_lost(site: Site) -> None:
    await site.admit("a")
    place = site.size()
    await site.play(1)
    await site.receive(1)
    await site.restart(place)
    await site.trainer.set_step(site.fence, 1)
    newer = site.connect()
    fence = await newer.take_fence(0)
    assert [one.group.outcome for one in await newer.take_groups(fence, 4, 0)] == ["lost"]
    (balance,) = await newer.balance()
    assert (balance.verdicts, balance.closed) == ({"lost": 1}, True)
    assert await newer.dead("", 4) == []
    await newer.settle(fence, [StepEntry("", "a", "failed")])
    assert await newer.balance() == [balance]
