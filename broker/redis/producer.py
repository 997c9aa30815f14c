"""A producer's side of a run: take tasks under a lease, publish groups, give tasks back."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable
from functools import partial
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
        self._holding: dict[str, int] = {}
        """Entry id to attempt of what `take` handed out and nothing has ended: at most what the caller holds."""
        self._take_lost = False
        """A read failed after Redis may have delivered; the next `take` asks for what it carried."""
        self._strange = False
        """Something is pending to this producer that it does not know of; the next `take` asks for it."""
        self._epoch = 0
        """Of the connection, when `take` last asked."""
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
        end = time.monotonic() + block_ms / 1000
        while count > 0:
            left_ms = max(0, round(1000 * (end - time.monotonic())))
            # One who waits looks three times a lease whether another's has run out.
            wait_ms = min(left_ms, milliseconds(self._lease_s / 3))
            taken = await self._link.call(partial(self._take_once, producer, count, wait_ms))
            if taken or left_ms == 0:
                found = [await self._accept(producer, entry) for entry in taken]
                return [delivery for delivery in found if delivery is not None]
        return []

    async def renew(self, producer: str, entry_ids: list[str]) -> list[str]:
        known = len(entry_ids), *entry_ids, *(self._holding.keys() - set(entry_ids))
        beat = self._link.keys.beats + producer, milliseconds(self._lease_s)
        raw, unknown = await self._link.script("renew", producer, *beat, *known)
        self._strange = self._strange or bool(unknown)
        lost = [text(entry_id) for entry_id in raw]
        self._forget(lost)
        return lost

    async def publish(self, producer: str, delivery: TaskDelivery, group: Group) -> Published:
        record = await self.record()
        task = delivery.task
        names = (delivery.entry_id, task.task_id, delivery.attempt, task.kind)
        answer = await self._outbox.publish(producer, names, lambda: encode_group(group, record.vocab_size))
        self._forget([delivery.entry_id])
        if answer == "published":
            return "published"
        return "repeated" if answer == "repeated" else "superseded"

    async def give_back(self, producer: str, entry_ids: list[str]) -> None:
        await self._link.script("give_back", producer, *entry_ids)
        self._forget(entry_ids)

    async def close(self) -> None:
        await self._outbox.close()
        await super().close()

    async def _take_once(self, producer: str, count: int, block_ms: int) -> list[Taken]:
        """Without waiting, tasks of the dead, what a lost reply carried, and new ones; if there are none, wait for one.

        Tried again by the caller when the connection fails: then `_take_lost` says that a reply may be lost.
        """
        lost = self._take_lost or self._strange or self._epoch != self._link.connection.epoch
        self._take_lost, self._strange, self._epoch = True, False, self._link.connection.epoch
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
        """The delivery; None for one that is held already, and for a task that is settled by rule instead of played."""
        judged = judge(taken, producer, self._max_deliveries, self._clock_ms + time.monotonic() * 1000)
        if isinstance(judged, Poison):
            await self._link.script("bury_task", producer, taken.entry_id, judged.reason, *remains(taken.body))
            self._forget([taken.entry_id])
            return None
        if isinstance(judged, Expired):
            await self.publish(producer, judged.delivery, judged.group)
            return None
        if self._holding.get(judged.entry_id) == judged.attempt:
            # Redis forgot that it had delivered this one.
            return None
        self._holding[judged.entry_id] = judged.attempt
        return judged

    def _forget(self, entry_ids: Iterable[str]) -> None:
        for entry_id in entry_ids:
            self._holding.pop(entry_id, None)


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
