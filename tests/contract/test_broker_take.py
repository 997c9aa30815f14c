"""What the trainer takes: the one group that each task waits for. All else is dead, or as if it were not there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import redis

from broker.codec import encode_task
from broker.connect import Run, connect_run
from broker.keys import Keys
from broker.messages import Group, StepEntry
from headrace.errors import Fenced
from headrace.version import PolicyVersion
from tests.conftest import BROKER, Services
from tests.reigns import begun, closed
from tests.servers import ONE_SERVER
from tests.support import RedisProcess, make_group, make_task


@pytest.fixture
def raw(redis_server: RedisProcess) -> redis.Redis:
    with redis.Redis.from_url(redis_server.admin_url) as client:
        yield client


Encode = Callable[[Group, int], bytes]


@pytest.fixture
def encoding(monkeypatch: pytest.MonkeyPatch) -> Callable[[Encode], None]:
    """Makes producers write something else."""

    def change(encode: Encode) -> None:
        for module in ("broker.redis.producer", "broker.memory.producer"):
            monkeypatch.setattr(f"{module}.encode_group", encode)

    return change


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"\xc1", "group: the body is not msgpack"),
        (b"", "group: the body is not msgpack"),
        (b"\x92\x63\x80", "group: schema 99, but this process speaks 2"),
        (bytes(65 << 20), "an entry of 68157440 bytes, more than the 67108864 that a group may have"),
    ],
)
async def test_a_body_that_is_no_group_is_dead_and_frees_its_slot(
    service: Services, encoding: Callable[[Encode], None], body: bytes, reason: str
) -> None:
    run = service()
    fence = await begun(run, "a")
    (delivery,) = await run.take("p0", 1, 0)
    encoding(lambda *_: body)
    assert await run.publish("p0", delivery, make_group(delivery.task, 1, "p0")) == "published"
    (seen,) = await run.take_groups(fence, 4, 0)
    assert (seen.group.outcome, seen.group.error, seen.nbytes) == ("dead", reason, len(body))
    (letter,) = await run.dead("", 2)
    assert (letter.reason, letter.length) == (reason, len(body))
    assert await closed(run) == (1, 0, {"dead": 1})


@pytest.mark.parametrize(("incarnation", "step"), [(1, 6), (1, 3), (2, 4), (0, 5)])
async def test_a_version_that_no_incarnation_published_is_dead(service: Services, incarnation: int, step: int) -> None:
    run = service()
    fence = await begun(run, "a", "b")
    wrong, sound = await run.take("p0", 2, 0)
    group = make_group(wrong.task, 1, "p0")
    span = group.trajectories[1].spans[0]._replace(version=PolicyVersion(incarnation, step))
    members = (group.trajectories[0], replace(group.trajectories[1], spans=(span, group.trajectories[1].spans[1])))
    await run.publish("p0", wrong, replace(group, trajectories=members))
    await run.publish("p0", sound, make_group(sound.task, 1, "p0"))
    first, second = await run.take_groups(fence, 4, 0)
    assert first.group.error == f"version {incarnation}.{step} was published by no incarnation"
    assert (first.group.outcome, second.group.outcome) == ("dead", "played")
    assert await closed(run) == (2, 1, {"dead": 1})


async def test_versions_of_earlier_incarnations_and_of_other_services_are_known(service: Services) -> None:
    old, new, producer = service(), service(), service()
    stale = await begun(old, "a")
    (delivery,) = await producer.take("p0", 1, 0)
    fence = await new.take_fence(0)
    assert (stale.incarnation, fence.incarnation) == (1, 2)
    await producer.publish("p0", delivery, make_group(delivery.task, 1, "p0"))
    (arrived,) = await new.take_groups(fence, 1, 0)
    assert arrived.group.outcome == "played"


async def test_what_a_fenced_trainer_still_reads_is_the_new_ones(run: Run, redis_url: str, run_id: str) -> None:
    zombie = connect_run(redis_url, run_id, BROKER)
    stale = await zombie.take_fence(0)
    fence = await begun(run, *"abcd")
    for delivery in await run.take("p0", 4, 0):
        await run.publish("p0", delivery, make_group(delivery.task, 1, "p0"))
    for _ in range(2):
        with pytest.raises(Fenced, match="incarnation 2"):
            await zombie.take_groups(stale, 1, 0)
    arrived: list[str] = []
    while len(arrived) < 4:
        taken = await run.take_groups(fence, 3, 50)
        assert 0 < len(taken) <= 3
        arrived += [one.group.task_id for one in taken]
    assert sorted(arrived) == [*"abcd"]
    assert await run.take_groups(fence, 3, 0) == []
    await zombie.close()


async def test_foreign_entries_end_in_dead_and_the_trainer_goes_on(run: Run, raw: redis.Redis, run_id: str) -> None:
    keys = Keys(run_id)
    fence = await begun(run, "a")
    raw.xadd(keys.of("tasks"), {"task": "foreign", "attempt": "0", "kind": "train", "body": b"\xc1"})
    raw.xadd(keys.of("tasks"), {"nonsense": "1"})
    assert await closed(run) == (1, 1, {})
    (delivery,) = await run.take("p0", 4, 0)
    await run.publish("p0", delivery, make_group(delivery.task, 1, "p0"))
    body = raw.xrange(keys.of("groups"))[0][1][b"body"]
    fields = {"task": "a", "attempt": "1", "kind": "train", "producer": "p0"}
    raw.xadd(keys.of("groups"), {**fields, "body": b"not msgpack"})
    raw.xadd(keys.of("groups"), {**fields, "attempt": "7", "body": body})
    raw.xadd(keys.of("groups"), {"body": b""})
    assert await closed(run) == (1, 1, {})
    (arrived,) = await run.take_groups(fence, 8, 0)
    assert arrived.group.task_id == "a"
    assert (await run.depths()).dead == 5
    assert [fields[b"reason"].decode() for _, fields in raw.xrange(keys.of("dead"))] == [
        "task: the body is not msgpack",
        "task: the body is not msgpack",
        "its task has a group with other content already",
        "its task has the same group already",
        "no task waits for it",
    ]
    await run.settle(fence, [StepEntry(arrived.entry_id, "a", "trained")])
    assert await closed(run) == (1, 0, {"trained": 1})


async def test_a_group_that_the_trainer_holds_is_not_delivered_anew_when_redis_forgets_its_delivery(
    run: Run, raw: redis.Redis, run_id: str
) -> None:
    fence = await begun(run, "a", "b")
    first, second = await run.take("p0", 2, 0)
    await run.publish("p0", first, make_group(first.task, 1, "p0"))
    (held,) = await run.take_groups(fence, 1, 0)
    raw.xgroup_setid(Keys(run_id).of("groups"), "trainer", "0")
    assert await run.take_groups(fence, 1, 50) == []
    await run.publish("p0", second, make_group(second.task, 1, "p0"))
    (new,) = await run.take_groups(fence, 2, 50)
    entries = [StepEntry(one.entry_id, one.group.task_id, "trained") for one in (held, new)]
    await run.settle(fence, entries)
    assert await closed(run) == (2, 0, {"trained": 2})


async def test_groups_that_no_task_waits_for_are_dead_and_change_nothing(
    run: Run, raw: redis.Redis, run_id: str
) -> None:
    fence = await begun(run, "a", "b")
    (delivery,) = await run.take("p0", 1, 0)
    stream = Keys(run_id).of("groups")
    await run.publish("p0", delivery, make_group(delivery.task, 1, "p0"))
    fields = raw.xrange(stream)[0][1]
    for change in ({}, {b"body": b"other"}, {b"task": b"b"}, {b"task": b"nobody's"}):
        raw.xadd(stream, {**fields, **change})
    (first,) = await run.take_groups(fence, 8, 0)
    assert [letter.reason for letter in await run.dead("", 9)] == [
        "its task has the same group already",
        "its task has a group with other content already",
        "its task is not finished by the entry that waits for it",
        "no task waits for it",
    ]
    second = raw.xadd(stream, fields).decode()
    await run.settle(fence, [StepEntry(second, "a", "superseded")])
    assert await closed(run) == (2, 2, {})
    await run.settle(fence, [StepEntry(first.entry_id, "a", "trained")])
    assert await closed(run) == (2, 1, {"trained": 1})


async def test_settled_groups_stay_so_when_the_consumer_group_is_made_anew(
    run: Run, raw: redis.Redis, run_id: str
) -> None:
    fence = await begun(run, "a", "b")
    for delivery in await run.take("p0", 2, 0):
        await run.publish("p0", delivery, make_group(delivery.task, 1, "p0"))
    first, second = await run.take_groups(fence, 2, 0)
    verdict = StepEntry(first.entry_id, "a", "trained")
    await run.settle(fence, [verdict])
    raw.xgroup_destroy(Keys(run_id).of("groups"), "trainer")
    assert await run.take_groups(fence, 2, 50) == []
    await run.settle(fence, [verdict, verdict])
    assert raw.lrange(Keys(run_id).of("settled"), 0, -1) == [first.entry_id.encode()]
    assert await closed(run) == (2, 1, {"trained": 1})
    await run.settle(fence, [StepEntry(second.entry_id, "b", "trained")])
    assert await closed(run) == (2, 0, {"trained": 2})
    assert await run.dead("", 9) == []


async def test_a_task_that_redis_has_played_again_closes_with_the_group_that_the_trainer_has(
    run: Run, raw: redis.Redis, run_id: str
) -> None:
    fence = await begun(run, "a", "b")
    keys = Keys(run_id)
    for delivery in await run.take("p0", 2, 0):
        await run.publish("p0", delivery, make_group(delivery.task, 1, "p0"))
    held = {one.group.task_id: one for one in await run.take_groups(fence, 2, 0)}
    # As a Redis does that lost the groups, and then gets others.
    for name in held:
        raw.xdel(keys.of("groups"), held[name].entry_id)
        fields = {"task": name, "attempt": "0", "kind": "train", "body": encode_task(make_task(name))}
        entry_id = raw.xadd(keys.of("tasks"), fields).decode()
        raw.hset(keys.of("open"), name, f"train t {entry_id}")
    (again,) = await run.take("p0", 1, 0)
    assert await run.publish("p0", again, make_group(again.task, 1, "p0")) == "published"
    assert await run.take_groups(fence, 2, 0) == [], "the trainer has a group of this task"
    assert await run.take_groups(fence, 2, 0) == []
    assert await closed(run) == (2, 2, {})
    await run.settle(fence, [StepEntry(held["a"].entry_id, "a", "superseded")])
    assert await closed(run) == (2, 2, {}), "a superseded group leaves its task as it is"
    (second,) = await run.take_groups(fence, 2, 0)
    assert second.group.task_id == "a"
    verdicts = [StepEntry(second.entry_id, "a", "trained"), StepEntry(held["b"].entry_id, "b", "trained")]
    await run.settle(fence, verdicts)
    assert await closed(run) == (2, 0, {"trained": 2})
    assert await run.take("p0", 1, 0) == []


@ONE_SERVER
async def test_huge_entries_are_read_alone(run: Run, raw: redis.Redis, run_id: str) -> None:
    stale = await begun(run, *"abcd")
    stream = Keys(run_id).of("groups")
    for delivery in await run.take("p0", 4, 0):
        await run.publish("p0", delivery, make_group(delivery.task, 1, "p0"))
    for _ in range(3):
        raw.xadd(stream, {"task": "huge", "attempt": "1", "kind": "train", "body": bytes(70 << 20)})
    # A backlog that is there when a trainer begins, or is left by a read.
    fence = await run.take_fence(stale.incarnation)
    seen: list[str] = []
    while (await run.depths()).dead < 3:
        read = (await run.depths()).groups_waiting
        seen += [one.group.task_id for one in await run.take_groups(fence, 32, 0)]
        assert read - (await run.depths()).groups_waiting <= 2
    assert sorted(seen) == [*"abcd"]
    assert [letter.length for letter in await run.dead("", 9)] == [70 << 20] * 3


@ONE_SERVER
async def test_dead_keeps_a_mebibyte_of_a_huge_entry(run: Run, raw: redis.Redis, run_id: str) -> None:
    fence = await begun(run, "a")
    raw.xadd(Keys(run_id).of("groups"), {"task": "a", "attempt": "1", "kind": "train", "body": bytes(70 << 20)})
    assert await run.take_groups(fence, 1, 0) == []
    ((_, entry),) = raw.xrange(Keys(run_id).of("dead"))
    assert (len(entry[b"body"]), entry[b"length"]) == (1 << 20, str(70 << 20).encode())
    assert len(entry[b"sha256"]) == 64
