"""What every broker does: the way of a task, its group, the trainer's fence, weights, orders, the balance sheet."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import numpy as np
import pytest

from broker.api import Hello, Peer, RunRecord
from broker.connect import Run
from broker.messages import SCHEMA, GroupDelivery, StepEntry, StepRecord
from headrace.errors import Fenced, Refused
from headrace.version import PolicyVersion
from tests.conftest import BROKER, Services
from tests.reigns import reign
from tests.servers import ONE_AND_MEMORY
from tests.support import make_group, make_task, wait_until

LEASE_S = 30.0
Waits = Callable[[], Awaitable[bool]]


async def beat(run: Run, name: str, lease_s: float = LEASE_S) -> None:
    await run.heartbeat(Peer(name, "producer", "host", 1, True, {"busy": 3}), lease_s)


async def die(run: Run, name: str) -> None:
    """As if its lease had run out."""
    await run.retire(name)


async def sheet(run: Run, kind: str = "train") -> tuple[int, int, dict[str, int]]:
    for balance in await run.balance():
        assert balance.closed, balance
        if balance.kind == kind:
            return balance.admitted, balance.outstanding, balance.verdicts
    raise AssertionError(f"no balance of {kind}")


def entry(delivery: GroupDelivery, verdict: str = "trained", reason: str = "") -> StepEntry:
    return StepEntry(delivery.entry_id, delivery.group.task_id, verdict, reason)  # type: ignore[arg-type]


async def test_a_task_becomes_a_group_and_a_verdict(service: Services) -> None:
    trainer, producer = service(), service()
    fence = await reign(trainer)
    task = make_task("a")
    await trainer.admit(fence, [task])
    await beat(producer, "p0")
    (delivery,) = await producer.take("p0", 4, 0)
    assert delivery.task == task
    assert delivery.attempt == 1
    group = make_group(task, 1, "p0")
    assert await producer.publish("p0", delivery, group) == "published"
    (arrived,) = await trainer.take_groups(fence, 4, 0)
    assert arrived.nbytes > 0
    for sent, got in zip(group.trajectories, arrived.group.trajectories, strict=True):
        assert np.array_equal(sent.token_ids_T, got.token_ids_T)
        assert np.array_equal(sent.logprobs_T, got.logprobs_T)
        assert np.array_equal(sent.loss_mask_T, got.loss_mask_T)
        assert (sent.spans, sent.reward, sent.finish_reason) == (got.spans, got.reward, got.finish_reason)
    assert await sheet(trainer) == (1, 1, {})
    await trainer.settle(fence, [entry(arrived)])
    assert await sheet(trainer) == (1, 0, {"trained": 1})
    await trainer.settle(fence, [entry(arrived)])
    assert await sheet(trainer) == (1, 0, {"trained": 1})


async def test_admitting_twice_is_admitting_once(service: Services) -> None:
    trainer = service()
    fence = await reign(trainer)
    tasks = [make_task("a"), make_task("b", kind="eval")]
    await trainer.admit(fence, tasks)
    await trainer.admit(fence, tasks)
    assert await sheet(trainer) == (1, 1, {})
    assert await sheet(trainer, "eval") == (1, 1, {})
    depths = await trainer.depths()
    assert (depths.tasks_waiting, depths.tasks_held) == (2, 0)


async def test_depths_follow_the_tasks(service: Services) -> None:
    trainer, producer = service(), service()
    fence = await reign(trainer)
    await trainer.admit(fence, [make_task(name) for name in "abcd"])
    await beat(producer, "p0")
    taken = await producer.take("p0", 3, 0)
    await producer.publish("p0", taken[0], make_group(taken[0].task, 1, "p0"))
    await producer.publish("p0", taken[1], make_group(taken[1].task, 1, "p0"))
    await trainer.take_groups(fence, 1, 0)
    depths = await trainer.depths()
    assert (depths.tasks_waiting, depths.tasks_held, depths.groups_waiting, depths.groups_held) == (1, 1, 1, 1)


async def test_a_waiting_producer_is_woken_by_admission(service: Services, patient: Run, somebody_waits: Waits) -> None:
    trainer = service()
    fence = await reign(trainer)
    await beat(patient, "p0")
    waiting = asyncio.create_task(patient.take("p0", 1, 60_000))
    await wait_until(somebody_waits, "the producer waits")
    await trainer.admit(fence, [make_task("a")])
    (delivery,) = await asyncio.wait_for(waiting, 20)
    assert delivery.task.task_id == "a"


async def test_a_waiting_trainer_is_woken_by_a_group(service: Services, patient: Run, somebody_waits: Waits) -> None:
    producer = service()
    fence = await reign(patient)
    await patient.admit(fence, [make_task("a")])
    await beat(producer, "p0")
    (delivery,) = await producer.take("p0", 1, 0)
    waiting = asyncio.create_task(patient.take_groups(fence, 1, 60_000))
    await wait_until(somebody_waits, "the trainer waits")
    await producer.publish("p0", delivery, make_group(delivery.task, 1, "p0"))
    (arrived,) = await asyncio.wait_for(waiting, 20)
    assert arrived.group.task_id == "a"


async def test_publishing_twice_is_publishing_once(service: Services) -> None:
    trainer, producer = service(), service()
    fence = await reign(trainer)
    await trainer.admit(fence, [make_task("a")])
    await beat(producer, "p0")
    (delivery,) = await producer.take("p0", 1, 0)
    group = make_group(delivery.task, 1, "p0")
    assert await producer.publish("p0", delivery, group) == "published"
    assert await producer.publish("p0", delivery, group) == "repeated"
    (arrived,) = await trainer.take_groups(fence, 4, 0)
    await trainer.settle(fence, [entry(arrived)])
    assert await producer.publish("p0", delivery, group) == "repeated"
    assert await trainer.take_groups(fence, 4, 0) == []


async def test_tasks_of_a_dead_producer_go_to_another_and_it_is_superseded(service: Services) -> None:
    trainer, dead, alive = service(), service(), service()
    fence = await reign(trainer)
    await trainer.admit(fence, [make_task("a"), make_task("b")])
    await beat(dead, "dead")
    await beat(alive, "alive")
    old = await dead.take("dead", 2, 0)
    assert await alive.take("alive", 2, 0) == [], "a live producer is never robbed"
    await die(dead, "dead")
    (new,) = await alive.take("alive", 1, 0)
    assert (new.task, new.attempt) == (old[0].task, 2)
    assert await dead.renew("dead", [delivery.entry_id for delivery in old]) == [old[0].entry_id]
    assert await dead.publish("dead", old[0], make_group(new.task, 1, "dead")) == "superseded"
    assert await alive.publish("alive", new, make_group(new.task, 2, "alive")) == "published"
    assert await dead.publish("dead", old[0], make_group(new.task, 1, "dead")) == "superseded"
    assert await sheet(trainer) == (2, 2, {})


@ONE_AND_MEMORY
async def test_a_lease_runs_out(service: Services) -> None:
    trainer, dead, alive = service(), service(), service()
    fence = await reign(trainer)
    await trainer.admit(fence, [make_task("a")])
    await beat(dead, "dead", 0.05)
    await dead.take("dead", 1, 0)
    await beat(alive, "alive")
    taken = []

    async def taken_over() -> bool:
        taken.extend(await alive.take("alive", 1, 0))
        return bool(taken)

    await wait_until(taken_over, "the silent producer's task is taken over")
    assert taken[0].attempt == 2


async def test_a_process_that_joins_under_an_old_name_holds_nothing(service: Services, record: RunRecord) -> None:
    trainer, before, after = service(), service(), service()
    fence = await reign(trainer)
    await trainer.admit(fence, [make_task("a")])
    await beat(before, "p0")
    (old,) = await before.take("p0", 1, 0)
    await after.join(Hello("p0", SCHEMA, record.digests, "host", 2))
    assert await trainer.peers() == [], "it has said nothing yet, and the one before is gone"
    (new,) = await after.take("p0", 1, 0)
    assert (new.task, new.attempt) == (old.task, 2)
    assert await before.publish("p0", old, make_group(old.task, 1, "p0")) == "superseded"
    assert await after.publish("p0", new, make_group(new.task, 2, "p0")) == "published"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"schema": 99}, "schema 99"),
        ({"digests": {"model": "x" * 32, "tokenizer": "t" * 32, "chat_template": "c" * 32}}, "model xxxx"),
        ({"digests": {"model": "m" * 32, "tokenizer": "t" * 32}}, "chat template"),
    ],
)
async def test_a_producer_that_differs_is_refused(
    service: Services, record: RunRecord, change: dict[str, object], says: str
) -> None:
    hello = replace(Hello("p0", SCHEMA, record.digests, "host", 2), **change)
    with pytest.raises(Refused, match=says):
        await service().join(hello)


async def test_given_back_tasks_are_delivered_at_once(service: Services) -> None:
    trainer, leaving, other = service(), service(), service()
    fence = await reign(trainer)
    await trainer.admit(fence, [make_task("a")])
    await beat(leaving, "leaving")
    await beat(other, "other")
    for attempt in range(1, 6):
        (delivery,) = await leaving.take("leaving", 1, 0)
        assert delivery.attempt == attempt, "giving back does not make a task poison"
        await leaving.give_back("leaving", [delivery.entry_id])
        assert await sheet(trainer) == (1, 1, {})
    (taken,) = await other.take("other", 1, 0)
    assert taken.attempt == 6
    await leaving.give_back("leaving", [taken.entry_id])
    assert await other.renew("other", [taken.entry_id]) == []
    assert await leaving.publish("leaving", delivery, make_group(delivery.task, 5, "leaving")) == "superseded"
    assert await other.publish("other", taken, make_group(taken.task, 6, "other")) == "published"


async def test_a_task_that_kills_its_producers_is_dead(service: Services) -> None:
    trainer = service()
    fence = await reign(trainer)
    await trainer.admit(fence, [make_task("poison"), make_task("good")])
    for number in range(BROKER.max_deliveries):
        victim = service()
        await beat(victim, f"p{number}")
        (delivery,) = await victim.take(f"p{number}", 1, 0)
        assert (delivery.task.task_id, delivery.attempt) == ("poison", number + 1)
        await die(victim, f"p{number}")
    survivor = service()
    await beat(survivor, "survivor")
    taken = await survivor.take("survivor", 1, 0) or await survivor.take("survivor", 1, 0)
    assert [delivery.task.task_id for delivery in taken] == ["good"]
    assert (await trainer.depths()).dead == 1
    assert await sheet(trainer) == (2, 2, {})
    (seen,) = await trainer.take_groups(fence, 4, 0)
    assert seen.group.task_id == "poison"
    assert seen.group.trajectories == ()
    assert "delivered 3 times" in seen.group.error
    assert await sheet(trainer) == (2, 1, {"dead": 1})
    await trainer.settle(fence, [entry(seen, "failed", "counted already")])
    assert await sheet(trainer) == (2, 1, {"dead": 1})


async def test_a_task_past_its_deadline_fails_by_rule(service: Services) -> None:
    trainer, producer = service(), service()
    fence = await reign(trainer)
    await trainer.admit(fence, [make_task("late", deadline_ms=await trainer.now_ms() - 1), make_task("good")])
    await beat(producer, "p0")
    (delivery,) = await producer.take("p0", 4, 0)
    assert delivery.task.task_id == "good"
    (failed,) = await trainer.take_groups(fence, 4, 0)
    assert failed.group.task_id == "late"
    assert "deadline" in failed.group.error
    await trainer.settle(fence, [entry(failed, "failed", failed.group.error)])
    assert await sheet(trainer) == (2, 1, {"failed": 1})


async def test_an_invalid_group_is_dead_and_frees_its_slot(service: Services) -> None:
    trainer, producer = service(), service()
    fence = await reign(trainer)
    await trainer.admit(fence, [make_task("bad"), make_task("good")])
    await beat(producer, "p0")
    bad, good = await producer.take("p0", 2, 0)
    await producer.publish("p0", bad, make_group(bad.task, 1, "p0", vocab=5000))
    await producer.publish("p0", good, make_group(good.task, 1, "p0"))
    first, second = await trainer.take_groups(fence, 4, 0)
    assert first.group.error.startswith("token id")
    assert second.group.error == ""
    assert await sheet(trainer) == (2, 1, {"dead": 1})
    assert (await trainer.depths()).dead == 1
    assert [delivery.group.task_id for delivery in await trainer.open_groups(fence)] == ["good"]


async def test_an_older_trainer_is_fenced_in_everything(service: Services) -> None:
    old, new = service(), service()
    stale = await old.take_fence(0)
    fence = await new.take_fence(6)
    assert fence.incarnation == 7
    assert (await new.state()).incarnation == 7
    forbidden = [
        old.admit(stale, [make_task("a")]),
        old.take_groups(stale, 1, 0),
        old.open_groups(stale),
        old.append_step(stale, StepRecord(PolicyVersion(1, 1), ())),
        old.settle(stale, [StepEntry("1-1", "a", "trained")]),
        old.set_step(stale, 9),
        old.heartbeat(Peer("trainer", "trainer", "host", 1, True, {}), LEASE_S),
        old.publish_head(stale, PolicyVersion(1, 1), b"manifest"),
        old.finish(stale, "finished", ""),
    ]
    for call in forbidden:
        with pytest.raises(Fenced, match="incarnation 7"):
            await call
    assert (await new.take_fence(2)).incarnation == 8
    assert await new.head() is None


async def test_a_new_trainer_takes_over_what_was_open(service: Services) -> None:
    old, new, producer = service(), service(), service()
    stale = await reign(old)
    await old.admit(stale, [make_task(name) for name in "abcd"])
    await beat(producer, "p0")
    for delivery in await producer.take("p0", 4, 0):
        await producer.publish("p0", delivery, make_group(delivery.task, 1, "p0"))
    taken = await old.take_groups(stale, 3, 0)
    await old.settle(stale, [entry(taken[0])])
    fence = await reign(new)
    assert [delivery.group.task_id for delivery in await new.open_groups(fence)] == ["b", "c"]
    (last,) = await new.take_groups(fence, 4, 0)
    assert last.group.task_id == "d"
    await new.settle(fence, [entry(taken[1]), entry(taken[2]), entry(last, "stale", "lag 9")])
    assert await sheet(new) == (4, 0, {"stale": 1, "trained": 3})
    (balance,) = await new.balance()
    assert balance.reasons == {"stale: lag 9": 1}


async def test_the_step_log_is_replayed_without_forks(service: Services) -> None:
    trainer = service()
    first = await reign(trainer)
    records = [
        StepRecord(PolicyVersion(1, step), (StepEntry(f"{step}-0", f"t{step}", "trained"),)) for step in (1, 2, 3)
    ]
    for record in records:
        await trainer.append_step(first, record)
        await trainer.append_step(first, record)
    assert await trainer.steps_after(0) == records
    assert await trainer.steps_after(1) == records[1:]
    second = await reign(trainer)
    forked = StepRecord(PolicyVersion(2, 2), (StepEntry("9-0", "t9", "stale", "lag"),))
    await trainer.append_step(second, forked)
    assert await trainer.steps_after(0) == [records[0], forked]


async def test_finished_groups_can_be_read_without_taking_them(service: Services) -> None:
    trainer, producer, reader = service(), service(), service()
    fence = await reign(trainer)
    await trainer.admit(fence, [make_task("a"), make_task("b")])
    await beat(producer, "p0")
    taken = await producer.take("p0", 2, 0)
    await producer.publish("p0", taken[0], make_group(taken[0].task, 1, "p0"))
    (arrived,) = await trainer.take_groups(fence, 1, 0)
    await trainer.settle(fence, [entry(arrived)])
    ((cursor, seen, name),) = await reader.finished("", 0)
    assert (seen.group.task_id, name) == ("a", "p0")
    assert await reader.finished(cursor, 0) == []
    await producer.publish("p0", taken[1], make_group(taken[1].task, 1, "p0"))
    assert [row[1].group.task_id for row in await reader.finished(cursor, 500)] == ["b"]
    assert len(await trainer.take_groups(fence, 4, 0)) == 1


async def test_settled_groups_leave_in_the_end(service: Services) -> None:
    trainer, producer, reader = service(), service(), service()
    fence = await reign(trainer)
    await beat(producer, "p0")
    for batch in range(10):
        await trainer.admit(fence, [make_task(f"{batch}-{number}") for number in range(20)])
        for delivery in await producer.take("p0", 20, 0):
            await producer.publish("p0", delivery, make_group(delivery.task, 1, "p0"))
        await trainer.settle(fence, [entry(one) for one in await trainer.take_groups(fence, 20, 0)])
    assert await sheet(trainer) == (200, 0, {"trained": 200})
    seen, cursor = 0, ""
    while page := await reader.finished(cursor, 0):
        seen, cursor = seen + len(page), page[-1][0]
    assert seen == 64
