"""What tests do in a trainer's place."""

from __future__ import annotations

from broker.api import Fence, Peer
from broker.connect import Run
from headrace.version import PolicyVersion
from tests.support import make_task


async def reign(run: Run, newest_checkpoint: int = 0) -> Fence:
    """The fence, once the versions are published that rollouts of `tests.support` were sampled from."""
    fence = await run.take_fence(newest_checkpoint)
    for step in (4, 5):
        await run.publish_head(fence, PolicyVersion(1, step), b"")
    return fence


async def begun(run: Run, *names: str) -> Fence:
    """A reign with these tasks admitted, and a producer p0 that lives."""
    fence = await reign(run)
    await run.admit(fence, [make_task(name) for name in names])
    await run.heartbeat(Peer("p0", "producer", "host", 1, True, {}), 30.0)
    return fence


async def closed(run: Run) -> tuple[int, int, dict[str, int]]:
    """Admitted, outstanding and verdicts of the training tasks, once it is seen that the sheet closes."""
    (balance,) = await run.balance()
    assert balance.closed, balance
    return balance.admitted, balance.outstanding, balance.verdicts
