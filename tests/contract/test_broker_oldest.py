"""Which tasks have no group yet, who has them, and since when they are admitted."""

from __future__ import annotations

from broker.api import Peer
from tests.conftest import Services
from tests.reigns import reign
from tests.support import make_group, make_task


async def test_the_oldest_tasks_are_told_with_their_holders(service: Services) -> None:
    trainer, producer, operator = service(), service(), service()
    fence = await reign(trainer)
    before_ms = await operator.now_ms()
    assert await operator.oldest_tasks(5) == []
    await trainer.admit(fence, [make_task("a"), make_task("b", kind="eval"), make_task("c")])
    await producer.heartbeat(Peer("p0", "producer", "host", 1, True, {}), 30.0)
    first, _ = await producer.take("p0", 2, 0)
    after_ms = await operator.now_ms()
    found = await operator.oldest_tasks(5)
    assert [(task.task_id, task.kind, task.holder, task.deliveries) for task in found] == [
        ("a", "train", "p0", 1),
        ("b", "eval", "p0", 1),
        ("c", "train", "", 0),
    ]
    # Ids in memory count up where several begin within one millisecond.
    assert all(before_ms <= task.admitted_ms <= after_ms + 3 for task in found)
    assert [task.task_id for task in await operator.oldest_tasks(1)] == ["a"]
    assert await operator.oldest_tasks(0) == []
    await producer.publish("p0", first, make_group(first.task, 1, "p0"))
    assert [task.task_id for task in await operator.oldest_tasks(5)] == ["b", "c"]


async def test_one_that_is_handed_out_again_says_so(service: Services) -> None:
    trainer, producer = service(), service()
    fence = await reign(trainer)
    await trainer.admit(fence, [make_task("a")])
    for name in ("p0", "p1"):
        await producer.heartbeat(Peer(name, "producer", "host", 1, True, {}), 30.0)
    await producer.take("p0", 1, 0)
    await producer.retire("p0")
    await producer.take("p1", 1, 0)
    (task,) = await producer.oldest_tasks(5)
    assert (task.holder, task.deliveries) == ("p1", 2)
