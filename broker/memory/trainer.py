"""The trainer's side of a run in memory."""

from __future__ import annotations

import secrets
from dataclasses import replace

from broker.api import Fence, Order, Reign, RunStatus
from broker.arrivals import Arrival, limits_of, unpublished
from broker.codec import decode_task, encode_task
from broker.memory.service import MemoryService
from broker.messages import GroupDelivery, StepEntry, StepRecord, Task
from broker.steps import replayable
from headrace.errors import WireError


class MemoryTrainer(MemoryService):
    """TrainerPort in memory."""

    async def take_fence(self, newest_checkpoint: int) -> Fence:
        store = self.store
        incarnation = max(store.state.incarnation, newest_checkpoint) + 1
        store.nonce = secrets.token_hex(16)
        store.state = replace(store.state, incarnation=incarnation, status="running", reason="")
        self._fence = Fence(incarnation, store.nonce)
        return self._fence

    async def admit(self, fence: Fence, tasks: list[Task], cursor: int | None = None) -> None:
        store = self.fenced(fence)
        store.admit((task, encode_task(task)) for task in tasks)
        if cursor is not None:
            store.state = replace(store.state, cursor=cursor)

    async def reigns(self) -> dict[int, Reign]:
        return dict(self.store.reigns)

    @property
    def mended(self) -> int:
        return 0

    async def take_groups(self, fence: Fence, count: int, block_ms: int) -> list[GroupDelivery]:
        store = self.fenced(fence)
        if count < 1:
            return []
        arrivals = await store.wait(lambda: self.fenced(fence).take_groups(fence.nonce, count), block_ms)
        return self._deliver(fence, arrivals)

    async def open_groups(self, fence: Fence) -> list[GroupDelivery]:
        return self._deliver(fence, self.fenced(fence).open_groups(fence.nonce))

    async def overdue(self, by_ms: int) -> list[Task]:
        before_ms = await self.now_ms() - by_ms
        tasks = [decode_task(entry.taken.body) for entry in self.store.tasks.values()]
        return [task for task in tasks if task.deadline_ms < before_ms]

    async def append_step(self, fence: Fence, record: StepRecord) -> None:
        steps = self.fenced(fence).steps
        if not steps or steps[-1].version != record.version:
            steps.append(record)

    async def steps_after(self, step: int) -> list[StepRecord]:
        return replayable(self.store.steps, step)

    async def settle(self, fence: Fence, entries: list[StepEntry]) -> None:
        store = self.fenced(fence)
        for entry in entries:
            store.settle(entry)

    async def set_step(self, fence: Fence, step: int) -> None:
        store = self.fenced(fence)
        store.state = replace(store.state, step=step)

    async def finish(self, fence: Fence, status: RunStatus, reason: str) -> None:
        store = self.fenced(fence)
        store.state = replace(store.state, status=status, reason=reason)
        await self.order(Order("", "end", reason=reason))

    def _deliver(self, fence: Fence, arrivals: list[Arrival]) -> list[GroupDelivery]:
        store = self.fenced(fence)
        limits = limits_of(store.record)
        delivered = []
        for arrival in arrivals:
            try:
                group = arrival.group(limits)
                if version := unpublished(group, store.reigns):
                    raise WireError(f"version {version} was published by no incarnation")
            except WireError as error:
                reason = str(error)
                if not store.bury_group(arrival, reason):
                    continue
                group = arrival.refused(reason)
            delivered.append(GroupDelivery(arrival.entry_id, len(arrival.body), group))
        return delivered
