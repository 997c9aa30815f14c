"""A producer's side of a run in memory."""

from __future__ import annotations

import time

from broker.api import Hello, Published
from broker.arrivals import Arrival
from broker.codec import encode_group
from broker.identity import difference
from broker.leases import Expired, Poison, Taken, judge
from broker.memory.service import MemoryService
from broker.memory.store import NOBODY, RunStore, now_ms
from broker.messages import Group, TaskDelivery
from headrace.errors import Refused


class MemoryProducer(MemoryService):
    """ProducerPort in memory."""

    def __init__(self, run_id: str, store: RunStore | None, max_deliveries: int) -> None:
        super().__init__(run_id, store)
        self._max_deliveries = max_deliveries

    async def join(self, hello: Hello) -> None:
        store = self.store
        if reason := difference(store.record, hello):
            raise Refused(f"run {self._run_id} does not accept producer {hello.producer}: {reason}")
        for entry in store.tasks.values():
            if entry.consumer == hello.producer:
                entry.consumer = NOBODY
        store.peers.pop(hello.producer, None)
        self._beat(hello.producer)

    async def take(self, producer: str, count: int, block_ms: int) -> list[TaskDelivery]:
        if count < 1:
            return []
        store = self.store
        deliveries = []
        for taken in await self._taken(producer, count, block_ms):
            judged = judge(taken, producer, self._max_deliveries, now_ms())
            if isinstance(judged, Poison):
                store.bury_task(producer, taken.entry_id, judged.reason)
            elif isinstance(judged, Expired):
                await self.publish(producer, judged.delivery, judged.group)
            else:
                deliveries.append(judged)
        return deliveries

    async def _taken(self, producer: str, count: int, block_ms: int) -> list[Taken]:
        """One who waits looks three times a lease whether another's has run out."""
        store, end = self.store, time.monotonic() + block_ms / 1000
        while True:
            self._beat(producer)
            left_ms = max(0.0, 1000 * (end - time.monotonic()))
            taken = await store.wait(lambda: store.take(producer, count), min(left_ms, 1000 / 3 * self._lease_s))
            if taken or left_ms == 0 or store.gone:
                return taken

    async def renew(self, producer: str, entry_ids: list[str]) -> list[str]:
        if self.store.alive(producer):
            self._beat(producer)
        return [entry_id for entry_id in entry_ids if self.store.holds(producer, entry_id) is None]

    async def publish(self, producer: str, delivery: TaskDelivery, group: Group) -> Published:
        store = self.store
        task = delivery.task
        body = encode_group(group, store.record.vocab_size)
        arrival = Arrival(store.new_id(), task.task_id, str(delivery.attempt), task.kind, producer, body)
        return store.publish(producer, delivery.entry_id, arrival)

    async def give_back(self, producer: str, entry_ids: list[str]) -> None:
        for entry_id in entry_ids:
            self.store.give_back(producer, entry_id)
