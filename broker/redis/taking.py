"""How the trainer takes groups: one round trip that asks the fence and reads, one that asks who waits for them.

Where few tasks are open, their states come with the first: then whoever waits for a group has it sooner.

A trainer that lost its fence may still read in that round trip; its deliveries are the new one's at its next look,
which adopts whatever other consumers hold.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from broker.api import Fence, Reign
from broker.arrivals import Arrival, groups_of, limits_of, unpublished
from broker.held import Held, fitting
from broker.messages import Group, GroupDelivery, Verdict
from broker.redis.link import Entry, Fields, Link, entries_of, stream_entries, text
from broker.redis.mending import Mender
from broker.redis.producer import remains
from broker.redis.service import RedisService
from broker.validate import MAX_GROUP_BYTES
from headrace.errors import WireError

BATCH = 256
"""Deliveries that are adopted at once, so that no script blocks Redis for long."""
PAGE = 32
"""Groups read at once when an earlier trainer's are taken over."""
FEW = 256
"""Open tasks that are told with each read; more are asked about by name, after it."""
_REIGN = re.compile(r"([0-9]{1,10}) ([0-9]{1,10})")


@dataclass(frozen=True, slots=True)
class Told:
    """What a read told besides its entries."""

    replays: int
    open: Fields
    """The hash: task to its kind, where it is, and the entry of it that is open."""

    def waits(self, arrival: Arrival) -> bool:
        """Whether this is the entry that its task waits for."""
        return text(self.open.get(arrival.task_id.encode())).split(" ")[1:] == ["g", arrival.entry_id]


class RedisTaking(RedisService):
    """The part of TrainerPort that brings groups."""

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        self._held = Held()
        self._mender = Mender(link, self._held)
        self._groups_lost = False
        """A read failed after Redis may have delivered; the next one asks for what it carried."""
        self._left = 0, 0
        """Entries that were left to read at the last look, and their bytes."""

    async def take_groups(self, fence: Fence, count: int, block_ms: int) -> list[GroupDelivery]:
        if count < 1:
            return []
        entries, told = await self._link.call(lambda: self._take_groups_once(fence, count, block_ms))
        mended = self._mender.mended
        await self._link.whole()
        arrivals = [arrival_of(entry_id, fields) for entry_id, fields in entries]
        look = len(entries) >= fitting(count, *self._left)
        if told and not look and mended == self._mender.mended and all(map(told.waits, arrivals)):
            await self._mender.heard(told.replays)
            self._left = 0, 0
            return await self._receive_all(fence, arrivals, [""] * len(arrivals))
        return await self._deliver(fence, arrivals, look=look)

    async def open_groups(self, fence: Fence) -> list[GroupDelivery]:
        while await self._link.script("adopt", _consumer(fence), BATCH, fence=fence):
            pass
        delivered: list[GroupDelivery] = []
        count, after = PAGE if await small(self._link) else 1, "0"
        while True:
            reply = await self._link.send(*self._read(fence, count, None, after))
            page = reply[0][1] if reply else []
            if not page:
                return delivered
            after = text(page[-1][0])
            arrivals = [arrival_of(entry_id, fields) for entry_id, fields in entries_of(page)]
            delivered += await self._deliver(fence, arrivals, look=False)

    async def reigns(self) -> dict[int, Reign]:
        for incarnation, reign in reigns_of(await self._link.send("HGETALL", self._link.keys.of("reigns"))).items():
            self._link.published(incarnation, reign)
        return dict(self._link.reigns)

    def _read(self, fence: Fence, count: int, block_ms: int | None, after: str = ">") -> tuple[str | int, ...]:
        block = () if block_ms is None else ("BLOCK", self._link.block_ms(block_ms))
        stream = self._link.keys.of("groups")
        return "XREADGROUP", "GROUP", "trainer", _consumer(fence), "COUNT", count, *block, "STREAMS", stream, after

    async def _take_groups_once(self, fence: Fence, count: int, block_ms: int) -> tuple[list[Entry], Told | None]:
        """Tried again by the caller when the connection fails: then `_groups_lost` says that a reply may be lost."""
        count = fitting(count, *self._left)
        lost, self._groups_lost = self._groups_lost, True
        entries = await self._missed(fence, count) if lost else []
        more, told = len(entries) >= count, None
        if not entries:
            read = self._read(fence, count, block_ms if block_ms > 0 else None)
            asks = self._asks()
            adopted, reply, *says = await self._link.once_all((self._adopt(fence), read, *asks))
            entries = stream_entries(reply)
            told = Told(int(says[1] or 0), says[0]) if asks else None
            more = bool(adopted)
            if more and not entries:
                entries = await self._missed(fence, count)
        self._groups_lost = more
        # A Redis that came back without its last writes delivers anew what this trainer still holds.
        return [entry for entry in entries if not self._held.knows(entry[0])], told

    def _asks(self) -> list[tuple[Any, ...]]:
        """What is asked behind the read, and so holds for what it brings."""
        if not 0 < len(self._mender.mirror.outstanding) <= FEW:
            return []
        return [("HGETALL", self._link.keys.of("open")), ("HGET", self._link.keys.of("state"), "replays")]

    def _adopt(self, fence: Fence) -> tuple[Any, ...]:
        return self._link.evalsha("adopt", _consumer(fence), BATCH, fence=fence)

    async def _missed(self, fence: Fence, count: int) -> list[Entry]:
        """Deliveries to this trainer that it never saw: a lost reply's, or those of a trainer that is fenced."""
        me = _consumer(fence)
        missed = await self._link.once(self._link.evalsha("missed", me, count, *self._held.ids(), fence=fence))
        if not missed:
            return []
        stream = self._link.keys.of("groups")
        return entries_of(await self._link.once(("XCLAIM", stream, "trainer", me, 0, *missed)))

    async def _deliver(self, fence: Fence, arrivals: list[Arrival], *, look: bool) -> list[GroupDelivery]:
        if not arrivals:
            return []
        names = [part for arrival in arrivals for part in (arrival.entry_id, arrival.task_id)]
        replays, number, nbytes, *states = await self._link.script("arrived", int(look), *names)
        await self._mender.heard(replays)
        came = sum(len(arrival.body) for arrival in arrivals)
        self._left = number, max(0, nbytes - self._held.nbytes - came)
        return await self._receive_all(fence, arrivals, list(map(text, states)))

    async def _receive_all(self, fence: Fence, arrivals: list[Arrival], states: list[str]) -> list[GroupDelivery]:
        limits = limits_of(await self.record())
        awaited = [arrival for arrival, state in zip(arrivals, states, strict=True) if not state]
        groups = iter(groups_of(awaited, limits))
        delivered = []
        for arrival, state in zip(arrivals, states, strict=True):
            if not state:
                delivered += await self._receive(fence, arrival, next(groups))
            elif state != "settled":
                await self._bury(fence, arrival, "dead", state)
        return delivered

    async def _receive(self, fence: Fence, arrival: Arrival, group: Group | WireError) -> list[GroupDelivery]:
        """The delivery; none for an entry that nobody shall see."""
        if self._held.entries.get(arrival.task_id, arrival.entry_id) != arrival.entry_id:
            # Redis lost the group that was handed out, and had its task played again.
            self._held.stand_in(arrival.entry_id, arrival.task_id)
            return []
        if isinstance(group, Group) and unpublished(group, self._link.reigns):
            version = unpublished(group, await self.reigns())
            group = WireError(f"version {version} was published by no incarnation") if version else group
        if isinstance(group, WireError):
            await self._close(fence, arrival, "lost" if arrival.lost else "dead", str(group))
            group = arrival.refused(str(group))
        else:
            self._held.add(arrival.entry_id, arrival.task_id, len(arrival.body))
        return [GroupDelivery(arrival.entry_id, len(arrival.body), group)]

    async def _close(self, fence: Fence, arrival: Arrival, verdict: Verdict, reason: str) -> None:
        """The open group of a task is none that can be used."""
        self._mender.mirror.close(arrival.task_id, verdict, reason)
        await self._bury(fence, arrival, verdict, reason)

    async def _bury(self, fence: Fence, arrival: Arrival, verdict: Verdict, reason: str) -> None:
        remnant = remains(arrival.body)
        await self._link.script("bury_group", arrival.entry_id, verdict, reason, *remnant, fence=fence)


async def small(link: Link) -> bool:
    """Whether all groups that are there have together no more bytes than one of them may have."""
    _, _, nbytes = await link.script("arrived", 1)
    return int(nbytes) <= MAX_GROUP_BYTES


def arrival_of(entry_id: str, fields: Fields) -> Arrival:
    return Arrival(
        entry_id=entry_id,
        task_id=text(fields.get(b"task")),
        attempt=text(fields.get(b"attempt")),
        kind=text(fields.get(b"kind")),
        producer=text(fields.get(b"producer")),
        body=fields.get(b"body", b""),
        dead=text(fields.get(b"dead")),
        lost=text(fields.get(b"lost")),
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
