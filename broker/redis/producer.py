"""A producer's side of a run: take tasks under a lease, publish groups, give tasks back."""

from __future__ import annotations

import hashlib
import time
from typing import Any

from broker.api import Hello, Published
from broker.bounds import KEEP_PUBLISHED, MAX_DEAD, MAX_DEAD_BYTES
from broker.codec import encode_group
from broker.identity import difference
from broker.leases import Expired, Poison, Taken, judge
from broker.messages import Group, TaskDelivery
from broker.redis.link import Fields, Link, fields_of, stream_entries, text
from broker.redis.service import RedisService, milliseconds
from headrace.errors import Refused


class RedisProducer(RedisService):
    """ProducerPort on Redis."""

    def __init__(self, link: Link, max_deliveries: int) -> None:
        super().__init__(link)
        self._max_deliveries = max_deliveries
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
        lost, self._take_lost = self._take_lost, True
        taken = await self._take_now(producer, count, lost)
        if not taken and block_ms > 0:
            taken = await self._take_next(producer, count, block_ms)
        self._take_lost = False
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
        answer = text(
            await self._link.script(
                "publish",
                producer,
                delivery.entry_id,
                delivery.task.task_id,
                delivery.attempt,
                delivery.task.kind,
                body,
                KEEP_PUBLISHED,
            )
        )
        self._holding.discard(delivery.entry_id)
        if answer == "published":
            return "published"
        return "repeated" if answer == "repeated" else "superseded"

    async def give_back(self, producer: str, entry_ids: list[str]) -> None:
        await self._link.script("give_back", producer, *entry_ids)
        self._holding.difference_update(entry_ids)

    async def _take_now(self, producer: str, count: int, reply_lost: bool) -> list[Taken]:
        """Without waiting: tasks of the dead, what a lost reply carried, then new ones."""
        now_ms, rows = await self._link.script(
            "take",
            producer,
            self._link.keys.beats,
            milliseconds(self._lease_s),
            count,
            int(reply_lost),
            *(self._holding if reply_lost else ()),
        )
        self._clock_ms = now_ms - time.monotonic() * 1000
        return [_taken(text(entry_id), deliveries, fields_of(flat)) for entry_id, deliveries, flat in rows]

    async def _take_next(self, producer: str, count: int, block_ms: int) -> list[Taken]:
        reply = await self._link.send(
            "XREADGROUP",
            "GROUP",
            "producers",
            producer,
            "COUNT",
            count,
            "BLOCK",
            self._link.block_ms(block_ms),
            "STREAMS",
            self._link.keys.of("tasks"),
            ">",
        )
        return [_taken(entry_id, 1, fields) for entry_id, fields in stream_entries(reply)]

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
