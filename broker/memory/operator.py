"""What the command line asks of a run in memory."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

from broker.api import Balance, RunStatus
from broker.arrivals import Arrival, limits_of
from broker.looks import OpenTask, QueueDepths
from broker.memory.service import MemoryService, number
from broker.messages import GroupDelivery, TaskKind
from broker.sheet import balances
from headrace.errors import WireError

PAGE = 16
"""Groups that `finished` reads at once."""


class MemoryOperator(MemoryService):
    """OperatorPort in memory."""

    _finished_from: str | None = None

    async def balance(self) -> list[Balance]:
        return balances(get_args(TaskKind), self.store.counts, self.store.outstanding())

    async def depths(self) -> QueueDepths:
        tasks = [bool(entry.consumer) for entry in self.store.tasks.values()]
        groups = [bool(entry.consumer) for entry in self.store.groups.values() if not entry.settled]
        return QueueDepths(
            tasks_waiting=tasks.count(False),
            tasks_held=tasks.count(True),
            groups_waiting=groups.count(False),
            groups_held=groups.count(True),
            dead=len(self.store.dead),
        )

    async def oldest_tasks(self, count: int) -> list[OpenTask]:
        return [
            OpenTask(one.taken.task_id, one.taken.kind, number(entry_id), one.consumer, one.taken.deliveries)
            for entry_id, one in list(self.store.tasks.items())[: max(0, count)]
        ]

    async def memory(self) -> tuple[int, int]:
        return 0, 0

    async def refusal(self) -> str:
        return ""

    async def set_status(self, status: RunStatus, reason: str) -> None:
        self.store.state = replace(self.store.state, status=status, reason=reason)

    async def finished(self, after: str, block_ms: int) -> list[tuple[str, GroupDelivery, str]]:
        store = self.store
        if after == "$":
            after = self._finished_from or (next(reversed(store.groups)) if store.groups else "0")
            self._finished_from = after
        place, limits = number(after), limits_of(store.record)

        def later() -> list[Arrival]:
            return [entry.arrival for entry_id, entry in store.groups.items() if number(entry_id) > place][:PAGE]

        found = []
        for arrival in await store.wait(later, block_ms):
            try:
                group = arrival.group(limits)
            except WireError as error:
                group = arrival.refused(str(error))
            delivery = GroupDelivery(arrival.entry_id, len(arrival.body), group)
            found.append((arrival.entry_id, delivery, arrival.producer))
        if found and self._finished_from is not None:
            self._finished_from = found[-1][0]
        return found
