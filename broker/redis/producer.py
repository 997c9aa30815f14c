"""A producer's side of a run: take tasks under a lease, publish groups, give tasks back."""

from __future__ import annotations

import hashlib
import time
from typing import Any

from broker.api import Hello, Published
from broker.bounds import MAX_DEAD, MAX_DEAD_BYTES
from broker.codec import encode_group
from broker.identity import difference
from broker.leases import Expired, Poison, Taken, judge
from broker.messages import Group, TaskDelivery
from broker.redis.link import Fields, Link, fields_of, stream_entries, text
from broker.redis.outbox import Outbox
from broker.redis.service import RedisService, milliseconds
from headrace.errors import Refused


class RedisProducer(RedisService):
    """ProducerPort on Redis."""

    def __init__(self, link: Link, max_deliveries: int) -> None:
        super().__init__(link)
        self._max_deliveries = max_deliveries
        self._outbox = Outbox(link)
        self._holding: set[str] = set()
        """Entry ids that `take` handed out and nothing has ended: at most what the caller holds."""
        self._take_lost = False
        """A read failed after Redis may have delivered; the next `take` asks for what it carried."""
        self._clock_ms = 0.0
        """Redis's clock minus the monotonic one."""

    async def join(self, hello: Hello) -> None:
        record = await self.record()
        if reason := difference(record, hello):
            raise Refused(f"run {record.run_id} does not accept producer {hello.producer}: {reason}")
        beat = self._link.keys.beats + hello.producer
        await self._link.script("join", hello.producer, beat, milliseconds(self._lease_s))
        self._holding.clear()

    async def take(self, producer: str, count: int, block_ms: int) -> list[TaskDelivery]:
        if count < 1:
            return []
        taken = await self._link.call(lambda: self._take_once(producer, count, block_ms))
        self._holding.update(entry.entry_id for entry in taken)
        deliveries = []
        for entry in taken:
            delivery = await self._accept(producer, entry)
            if delivery is not None:
                deliveries.append(delivery)
        return deliveries

    async def renew(self, producer: str, entry_ids: list[str]) -> list[str]:
        beat = self._link.keys.beats + producer
        lost = [
            text(raw)
            for raw in await self._link.script("renew", producer, beat, milliseconds(self._lease_s), *entry_ids)
        ]
        self._holding.difference_update(lost)
        return lost

    async def publish(self, producer: str, delivery: TaskDelivery, group: Group) -> Published:
        record = await self.record()
        body = encode_group(group, record.vocab_size)
        task = delivery.task
        names = (delivery.entry_id, task.task_id, delivery.attempt, task.kind)
        answer = await self._outbox.publish(producer, names, body)
        self._holding.discard(delivery.entry_id)
        if answer == "published":
            return "published"
        return "repeated" if answer == "repeated" else "superseded"

    async def give_back(self, producer: str, entry_ids: list[str]) -> None:
        await self._link.script("give_back", producer, *entry_ids)
        self._holding.difference_update(entry_ids)

    async def close(self) -> None:
        await self._outbox.close()
        await super().close()

    async def _take_once(self, producer: str, count: int, block_ms: int) -> list[Taken]:
        """Without waiting, tasks of the dead, what a lost reply carried, and new ones; if there are none, wait for one.

        Tried again by the caller when the connection fails: then `_take_lost` says that a reply may be lost.
        """
        lost, self._take_lost = self._take_lost, True
        holding = self._holding if lost else ()
        beats, lease_ms = self._link.keys.beats, milliseconds(self._lease_s)
        now_ms, rows = await self._link.once(
            self._link.evalsha("take", producer, beats, lease_ms, count, int(lost), *holding)
        )
        self._clock_ms = now_ms - time.monotonic() * 1000
        taken = [_taken(text(entry_id), deliveries, fields_of(flat)) for entry_id, deliveries, flat in rows]
        if not taken and block_ms > 0:
            block = ("COUNT", count, "BLOCK", self._link.block_ms(block_ms))
            stream = self._link.keys.of("tasks")
            reply = await self._link.once(
                ("XREADGROUP", "GROUP", "producers", producer, *block, "STREAMS", stream, ">")
            )
            taken = [_taken(entry_id, 1, fields) for entry_id, fields in stream_entries(reply)]
        self._take_lost = False
        return taken

    async def _accept(self, producer: str, taken: Taken) -> TaskDelivery | None:
        """The delivery; None for a task that nobody will play, which is then settled by rule."""
        judged = judge(taken, producer, self._max_deliveries, self._clock_ms + time.monotonic() * 1000)
        if isinstance(judged, Poison):
            await self._link.script("bury_task", producer, taken.entry_id, judged.reason, *remains(taken.body))
            self._holding.discard(taken.entry_id)
            return None
        if isinstance(judged, Expired):
            await self.publish(producer, judged.delivery, judged.group)
            return None
        return judged


def _taken(entry_id: str, deliveries: int, fields: Fields) -> Taken:
    return Taken(
        entry_id=entry_id,
        attempts_before=text(fields.get(b"attempt")),
        deliveries=deliveries,
        task_id=text(fields.get(b"task")),
        kind=text(fields.get(b"kind")),
        body=fields.get(b"body", b""),
    )


def remains(body: bytes) -> tuple[Any, ...]:
    """Arguments of the bury scripts: digest, length, and how much `dead` keeps."""
    return hashlib.sha256(body).hexdigest(), len(body), MAX_DEAD_BYTES, MAX_DEAD
