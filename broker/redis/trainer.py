"""The trainer's side of a run: admit tasks, take groups, keep the step log, settle. All under the fence."""

from __future__ import annotations

import re
import secrets

from broker.api import Fence, Reign, RunStatus
from broker.arrivals import Arrival, limits_of
from broker.bounds import KEEP_ENDED_MS, KEEP_SETTLED, MAX_ORDERS, MAX_STEPS
from broker.codec import decode_step, encode_step, encode_task
from broker.messages import GroupDelivery, StepEntry, StepRecord, Task
from broker.redis.link import Entry, Fields, Link, entries_of, stream_entries, text
from broker.redis.producer import remains
from broker.redis.service import RedisService
from broker.steps import replayable
from headrace.errors import WireError

BATCH = 256
"""Tasks or entries in one script, so that none blocks Redis for long."""
_REIGN = re.compile(r"([0-9]{1,10}) ([0-9]{1,10})")
PAGE = 32
"""Groups read at once when an earlier trainer's are taken over."""


class RedisTrainer(RedisService):
    """TrainerPort on Redis."""

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        self._open: set[str] = set()
        """Entry ids that were handed out and are not settled: at most the outstanding groups."""
        self._groups_lost = False

    async def take_fence(self, newest_checkpoint: int) -> Fence:
        nonce = secrets.token_hex(16)
        incarnation = await self._link.script("take_fence", nonce, newest_checkpoint)
        self._open.clear()
        return Fence(int(incarnation), nonce)

    async def admit(self, fence: Fence, tasks: list[Task], cursor: int | None = None) -> None:
        for first in range(0, max(1, len(tasks)), BATCH):
            some = tasks[first : first + BATCH]
            # The cursor moves with the last of them: what it counts is admitted by then.
            said = "" if cursor is None or first + BATCH < len(tasks) else cursor
            args = [part for task in some for part in (task.task_id, task.kind, encode_task(task))]
            await self._link.script("admit", said, *args, fence=fence)

    async def reigns(self) -> dict[int, Reign]:
        return reigns_of(await self._link.send("HGETALL", self._link.keys.of("reigns")))

    @property
    def mended(self) -> int:
        return 0

    async def take_groups(self, fence: Fence, count: int, block_ms: int) -> list[GroupDelivery]:
        if count < 1:
            return []
        entries = await self._link.call(lambda: self._take_groups_once(fence, count, block_ms))
        return await self._deliver(fence, entries)

    async def open_groups(self, fence: Fence) -> list[GroupDelivery]:
        while await self._link.script("adopt", _consumer(fence), BATCH, fence=fence):
            pass
        delivered: list[GroupDelivery] = []
        after = "0"
        while True:
            reply = await self._link.send(*self._read(fence, PAGE, None, after))
            page = reply[0][1] if reply else []
            if not page:
                return delivered
            after = text(page[-1][0])
            delivered += await self._deliver(fence, entries_of(page))

    async def append_step(self, fence: Fence, record: StepRecord) -> None:
        await self._link.script("append_step", str(record.version), encode_step(record), MAX_STEPS, fence=fence)

    async def steps_after(self, step: int) -> list[StepRecord]:
        reply = await self._link.send("XRANGE", self._link.keys.of("steps"), "-", "+")
        return replayable([decode_step(fields[b"body"]) for _, fields in entries_of(reply)], step)

    async def settle(self, fence: Fence, entries: list[StepEntry]) -> None:
        for first in range(0, len(entries), BATCH):
            some = entries[first : first + BATCH]
            args = [part for entry in some for part in (entry.entry_id, entry.task_id, entry.verdict, entry.reason)]
            await self._link.script("settle", KEEP_SETTLED, *args, fence=fence)
            self._open.difference_update(entry.entry_id for entry in some)

    async def set_step(self, fence: Fence, step: int) -> None:
        await self._link.script("set_step", step, fence=fence)

    async def finish(self, fence: Fence, status: RunStatus, reason: str) -> None:
        await self._link.script("finish", status, reason, KEEP_ENDED_MS, MAX_ORDERS, fence=fence)

    def _read(self, fence: Fence, count: int, block_ms: int | None, after: str = ">") -> tuple[str | int, ...]:
        block = () if block_ms is None else ("BLOCK", self._link.block_ms(block_ms))
        stream = self._link.keys.of("groups")
        return "XREADGROUP", "GROUP", "trainer", _consumer(fence), "COUNT", count, *block, "STREAMS", stream, after

    async def _take_groups_once(self, fence: Fence, count: int, block_ms: int) -> list[Entry]:
        """Tried again by the caller when the connection fails: then `_groups_lost` says that a reply may be lost.

        The fence is asked before anything is read: a trainer that lost it takes no delivery from the new one.
        """
        adopted = await self._link.once(self._link.evalsha("adopt", _consumer(fence), BATCH, fence=fence))
        self._groups_lost = self._groups_lost or bool(adopted)
        entries = await self._missed(fence) if self._groups_lost else []
        self._groups_lost = True
        if len(entries) < count:
            block = block_ms if block_ms > 0 and not entries else None
            read = stream_entries(await self._link.once(self._read(fence, count - len(entries), block)))
            # A Redis that came back without its last writes delivers anew what this trainer still holds.
            entries += [entry for entry in read if entry[0] not in self._open]
        self._groups_lost = False
        return entries

    async def _missed(self, fence: Fence) -> list[Entry]:
        """Deliveries to this trainer that it never saw: a lost reply's, or those of a trainer that is fenced."""
        me = _consumer(fence)
        missed = await self._link.once(self._link.evalsha("missed", me, *self._open, fence=fence))
        if not missed:
            return []
        stream = self._link.keys.of("groups")
        return entries_of(await self._link.once(("XCLAIM", stream, "trainer", me, 0, *missed)))

    async def _deliver(self, fence: Fence, entries: list[Entry]) -> list[GroupDelivery]:
        delivered = []
        limits = limits_of(await self.record())
        for entry_id, fields in entries:
            arrival = arrival_of(entry_id, fields)
            try:
                group = arrival.group(limits)
            except WireError as error:
                reason = str(error)
                buried = await self._link.script("bury_group", entry_id, reason, *remains(arrival.body), fence=fence)
                if buried:
                    delivered.append(GroupDelivery(entry_id, len(arrival.body), arrival.refused(reason)))
                continue
            self._open.add(entry_id)
            delivered.append(GroupDelivery(entry_id, len(arrival.body), group))
        return delivered


def arrival_of(entry_id: str, fields: Fields) -> Arrival:
    return Arrival(
        entry_id=entry_id,
        task_id=text(fields.get(b"task")),
        attempt=text(fields.get(b"attempt")),
        kind=text(fields.get(b"kind")),
        producer=text(fields.get(b"producer")),
        body=fields.get(b"body", b""),
        dead=text(fields.get(b"dead")),
    )


def reigns_of(fields: Fields) -> dict[int, Reign]:
    """The hash `reigns`; what is no reign is left out."""
    found = {}
    for incarnation, raw in fields.items():
        if (steps := _REIGN.fullmatch(text(raw))) and incarnation.isdigit():
            found[int(incarnation)] = Reign(int(steps[1]), int(steps[2]))
    return found


def _consumer(fence: Fence) -> str:
    """A consumer per trainer process: what a fenced one still reads can be told from ours."""
    return f"{fence.incarnation}-{fence.nonce[:8]}"
