"""How soon a group is received: few tasks are asked about with the read itself, many or strange ones after it."""

from __future__ import annotations

from unittest import mock

import pytest

from broker.api import Fence
from broker.connect import Run
from broker.messages import StepEntry
from broker.redis.link import Link
from broker.redis.taking import FEW
from tests.reigns import begun, closed
from tests.support import make_group


async def finished(run: Run, count: int) -> Fence:
    """The fence of a run with so many tasks, of which the first has its group."""
    fence = await begun(run, *(f"t{number}" for number in range(count)))
    (delivery,) = await run.take("p0", 1, 0)
    await run.publish("p0", delivery, make_group(delivery.task, 1, "p0"))
    return fence


@pytest.mark.parametrize(("tasks", "asked"), [(1, 0), (FEW, 0), (FEW + 1, 1)])
async def test_whether_it_is_waited_for_comes_with_the_read_where_few_wait(run: Run, tasks: int, asked: int) -> None:
    fence = await finished(run, tasks)
    with mock.patch.object(Link, "script", autospec=True, side_effect=Link.script) as script:
        (arrived,) = await run.take_groups(fence, 8, 0)
    assert [call.args[1] for call in script.call_args_list] == ["arrived"] * asked
    assert arrived.group.task_id == "t0"
    await run.settle(fence, [StepEntry(arrived.entry_id, "t0", "trained")])
    assert await closed(run) == (tasks, tasks - 1, {"trained": 1})
