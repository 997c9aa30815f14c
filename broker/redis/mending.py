"""Puts right what a Redis lacks that came back without its newest writes, or empty: from what its trainer knows.

    who              waits for                               woken by
    any call         the repair, where Redis may have lost   itself: it looks before it sends anything
    any call         the run, where it has vanished          itself: the call that finds it so puts the run back

One repair at a time, each a script: either Redis has all of it or nothing. When its answer is lost, its mark says so.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from dataclasses import dataclass
from typing import Any, cast

from redis import exceptions

from broker.api import Fence, RunStatus
from broker.bounds import KEEP_ENDED_MS
from broker.held import Held
from broker.mirror import Found, Kept, Mirror, Opened, Repair
from broker.redis.link import Link, entries_of, text
from broker.redis.records import encode_record

log = logging.getLogger(__name__)

LOST = "Redis lost its newest writes"
HELD = "Redis lost it, and the trainer that had it has gone"
PAGE = 256
"""Tasks read at once."""


@dataclass(frozen=True, slots=True)
class _Sent:
    mark: str
    repair: Repair


class Mender:
    """Of one trainer's port."""

    def __init__(self, link: Link, held: Held) -> None:
        self.mirror = Mirror()
        self.mended = 0
        """How often Redis came back since this trainer began."""
        self._link = link
        self._held = held
        self._fence: Fence | None = None
        self._epoch = 0
        """Of the connection, when Redis was last seen to be whole."""
        self._one = asyncio.Lock()
        self._sent: _Sent | None = None
        """A repair whose answer may have been lost."""

    async def begin(self, fence: Fence) -> None:
        """This port is the trainer now: learn what there is."""
        async with self._one:
            self._link.mends = None
            self._fence, self._epoch = fence, self._link.connection.epoch
            await self._link.record()
            await self._link.call(self._learn)
            self.mirror.even_out(LOST)
            # What lacks its entry already, nobody else will find.
            await self._link.call(self._repair_once)
        self._link.mends = self

    async def whole(self) -> None:
        """Return once Redis has what this trainer knows. Raises Fenced, Refused, BrokerUnavailable."""
        if self._epoch == self._link.connection.epoch:
            return
        async with self._one:
            while self._epoch != (epoch := self._link.connection.epoch):
                await self._link.connection.call(self._mend_once, on_failure=self._on_failure)
                self._epoch = epoch
                self.mended += 1

    async def heard(self, replays: int) -> None:
        """This is the newest replay of a dead letter: learn of those that are new."""
        if replays > self.mirror.replays:
            async with self._one:
                await self._link.connection.call(self._mend_once, on_failure=self._on_failure)

    async def _mend_once(self) -> None:
        fence, mirror = self._trainer, self.mirror
        record = encode_record(await self._link.record())
        reigns = [
            part for number, reign in self._link.reigns.items() for part in (number, f"{reign.first} {reign.newest}")
        ]
        kept_ms = KEEP_ENDED_MS if mirror.status in ("finished", "failed") else 0
        said = kept_ms, mirror.status, mirror.reason, mirror.step, mirror.cursor, mirror.replays
        await self._link.once(self._link.evalsha("restore", fence.incarnation, fence.nonce, record, *said, *reigns))
        if self._link.pins:
            # Before a head is there again, which frees what nobody keeps.
            pins = [part for version in self._link.pins for part in (str(version), "1")]
            await self._link.once(("HSET", self._link.keys.of("pins"), *pins))
        await self._repair_once()

    async def _repair_once(self) -> None:
        """Compare and put right; tried again by the caller as long as the connection fails."""
        done = False
        while not done:
            found, mark = await self._look()
            if self._sent is not None and self._sent.mark == mark:
                self.mirror.repaired(self._sent.repair, LOST)
            self._sent = None
            repair = self.mirror.compare(found, self._held.entries)
            done = repair.empty or await self._send(repair)
        self.mirror.repaired(repair, LOST)

    async def _send(self, repair: Repair) -> bool:
        """False when Redis did nothing, because its sheet has changed since it was looked at."""
        self._sent = _Sent(secrets.token_hex(8), repair)
        command = self._link.evalsha("repair_sheet", *_arguments(self._sent), fence=self._trainer)
        done = bool(await self._link.once(command))
        self._sent = None
        if done:
            log.warning("run %s: %s", self._link.run_id, _summary(repair))
        return done

    async def _look(self) -> tuple[Found, str]:
        sheet, replays, mark, strays, *rows = await self._link.once(self._link.evalsha("look", fence=self._trainer))
        counts = {text(name): int(value) for name, value in zip(sheet[::2], sheet[1::2], strict=True)}
        opened = {
            text(task_id): Opened(text(kind), text(where), bool(there), int(replay))
            for task_id, kind, where, there, replay in rows
        }
        return Found(counts, opened, int(replays), [text(entry_id) for entry_id in strays]), text(mark)

    async def _learn(self) -> None:
        """The mirror anew, from a Redis that is believed."""
        found, _ = await self._look()
        fields = await self._link.once(("HMGET", self._link.keys.of("state"), "status", "reason", "step", "cursor"))
        status, reason, step, cursor = map(text, fields)
        self.mirror = Mirror(
            cast(RunStatus, status),
            reason,
            int(step or 0),
            int(cursor or 0),
            Counter(found.counts),
            replays=found.replays,
        )
        bodies = await self._bodies()
        self.mirror.outstanding.update(
            (task_id, Kept(opened.kind, bodies.get(task_id))) for task_id, opened in found.open.items()
        )

    async def _bodies(self) -> dict[str, bytes]:
        """Of tasks that wait or are played; those whose group has come are not kept by anybody."""
        found: dict[str, bytes] = {}
        after = "-"
        while True:
            page = entries_of(await self._link.once(("XRANGE", self._link.keys.of("tasks"), after, "+", "COUNT", PAGE)))
            found.update((text(fields.get(b"task")), fields.get(b"body", b"")) for _, fields in page)
            if len(page) < PAGE:
                return found
            after = f"({page[-1][0]}"

    async def _on_failure(self, error: exceptions.RedisError) -> str | None:
        """What vanished while it was put back is put back from the start."""
        if isinstance(error, exceptions.ResponseError) and any(word in str(error) for word in ("GONE", "NOGROUP")):
            return ""
        return await self._link.on_failure(error)

    @property
    def _trainer(self) -> Fence:
        assert self._fence is not None
        return self._fence


def _arguments(sent: _Sent) -> list[Any]:
    repair = sent.repair
    lost = [(task_id, kept.kind, kept.body or b"") for task_id, kept in repair.lost]
    strays, closed = ([(name,) for name in names] for names in (repair.strays, repair.closed))
    lists = (list(repair.counts.items()), strays, closed, repair.held, lost)
    arguments: list[Any] = [sent.mark, repair.seen, LOST, HELD]
    for rows in lists:
        arguments += [len(rows), *(part for row in rows for part in row)]
    return arguments


def _summary(repair: Repair) -> str:
    again = sum(kept.body is not None for _, kept in repair.lost)
    return (
        f"Redis lacks {len(repair.lost)} tasks ({again} of them are asked again), {len(repair.held)} groups that the "
        f"trainer has, and the verdicts of {len(repair.closed)} tasks"
    )
