"""Tasks that nobody finished in time."""

from __future__ import annotations

import pytest

from broker.messages import StepEntry
from tests.conftest import Services
from tests.support import FAR_FUTURE_MS, make_group, make_task


@pytest.mark.parametrize("taken", [False, True])
async def test_a_task_without_a_group_is_overdue_on_the_brokers_clock(service: Services, taken: bool) -> None:
    trainer, producer = service(), service()
    fence = await trainer.take_fence(0)
    now = await trainer.now_ms()
    late = make_task("late", deadline_ms=now + 3_600_000)
    await trainer.admit(fence, [late, make_task("soon", deadline_ms=FAR_FUTURE_MS)])
    deliveries = await producer.take("p", 2, 0) if taken else []
    assert await trainer.overdue(0) == []
    assert await trainer.overdue(-3_700_000) == [late]
    await trainer.settle(fence, [StepEntry("", "late", "failed", "overdue")])
    assert await trainer.overdue(-3_700_000) == []
    (sheet,) = [sheet for sheet in await trainer.balance() if sheet.kind == "train"]
    assert (sheet.outstanding, sheet.verdicts, sheet.closed) == (1, {"failed": 1}, True)
    for delivery in deliveries:
        group = make_group(delivery.task, delivery.attempt, "p")
        expected = "superseded" if delivery.task == late else "published"
        assert await producer.publish("p", delivery, group) == expected
