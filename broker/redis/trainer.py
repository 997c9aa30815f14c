"""The trainer's side of a run: admit tasks, take groups, keep the step log, settle. All under the fence."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator
from typing import Any

from broker.api import Fence, RunStatus
from broker.bounds import KEEP_ENDED_MS, KEEP_SETTLED, MAX_ORDERS, MAX_STEPS
from broker.codec import decode_step, encode_step, encode_task
from broker.messages import StepEntry, StepRecord, Task
from broker.redis.link import Entry, entries_of, text
from broker.redis.overdue import overdue
from broker.redis.taking import BATCH, RedisTaking
from broker.steps import replayable
from headrace.errors import WireError

log = logging.getLogger(__name__)


class RedisTrainer(RedisTaking):
    """TrainerPort on Redis."""

    async def take_fence(self, newest_checkpoint: int) -> Fence:
        nonce = secrets.token_hex(16)
        incarnation = await self._link.script("take_fence", nonce, newest_checkpoint)
        self._fence = fence = Fence(int(incarnation), nonce)
        self._held.clear()
        await self._mender.begin(fence)
        _, number, nbytes = await self._link.script("arrived", 1)
        self._left = number, nbytes
        return fence

    async def admit(self, fence: Fence, tasks: list[Task], cursor: int | None = None) -> None:
        mirror = self._mender.mirror
        for first in range(0, max(1, len(tasks)), BATCH):
            some = [(task, encode_task(task)) for task in tasks[first : first + BATCH]]
            # The cursor moves with the last of them: what it counts is admitted by then.
            said = "" if cursor is None or first + BATCH < len(tasks) else cursor
            args = [part for task, body in some for part in (task.task_id, task.kind, body)]
            mirror.ask(some)
            replayed = await self._link.script("admit", said, *args, fence=fence)
            mirror.admitted([task.task_id for task, _ in some], set(map(text, replayed)))
        mirror.cursor = mirror.cursor if cursor is None else cursor
        await self._link.whole()

    @property
    def mended(self) -> int:
        return self._mender.mended

    async def overdue(self, by_ms: int) -> list[Task]:
        return await overdue(self._link, await self.now_ms() - by_ms)

    async def append_step(self, fence: Fence, record: StepRecord) -> None:
        await self._fenced("append_step", str(record.version), encode_step(record), MAX_STEPS, fence=fence)

    async def steps_after(self, step: int) -> list[StepRecord]:
        reply = await self._link.send("XRANGE", self._link.keys.of("steps"), "-", "+")
        return replayable(_readable(entries_of(reply)), step)

    async def settle(self, fence: Fence, entries: list[StepEntry]) -> None:
        for some in _batches(entries):
            args = [part for entry in some.values() for part in self._verdict(entry)]
            closed = await self._link.script("settle", KEEP_SETTLED, *args, fence=fence)
            for task_id in map(text, closed):
                self._mender.mirror.close(task_id, some[task_id].verdict, some[task_id].reason)
            for entry in some.values():
                stood_in = self._held.settle(entry.entry_id, entry.task_id)
                # Its task is open with another group, which nobody was given yet.
                self._groups_lost = self._groups_lost or (stood_in and entry.verdict == "superseded")
        await self._link.whole()

    async def set_step(self, fence: Fence, step: int) -> None:
        self._mender.mirror.step = step
        await self._fenced("set_step", step, fence=fence)

    async def finish(self, fence: Fence, status: RunStatus, reason: str) -> None:
        self._mender.mirror.status, self._mender.mirror.reason = status, reason
        await self._fenced("finish", status, reason, KEEP_ENDED_MS, MAX_ORDERS, fence=fence)

    async def _fenced(self, name: str, *args: Any, fence: Fence) -> None:
        """A script, and the repair if it was this call that found Redis started anew."""
        await self._link.script(name, *args, fence=fence)
        await self._link.whole()

    def _verdict(self, entry: StepEntry) -> tuple[str | int, ...]:
        """Its arguments. What is sure to close its task stands in the mirror before it is sent."""
        held = self._held.tasks.get(entry.entry_id) == entry.task_id
        if not entry.entry_id or (
            held and (entry.verdict != "superseded" or not self._held.has_stand_in(entry.task_id))
        ):
            self._mender.mirror.close(entry.task_id, entry.verdict, entry.reason)
        return entry.entry_id, entry.task_id, entry.verdict, entry.reason, int(held)


def _batches(entries: list[StepEntry]) -> Iterator[dict[str, StepEntry]]:
    """By task, one of each at once: the script answers which tasks it closed, not by which entry."""
    some: dict[str, StepEntry] = {}
    for entry in entries:
        if entry.task_id in some or len(some) == BATCH:
            yield some
            some = {}
        some[entry.task_id] = entry
    if some:
        yield some


def _readable(entries: list[Entry]) -> Iterator[StepRecord]:
    """A record that is none leaves a gap, where the history then ends."""
    for entry_id, fields in entries:
        try:
            yield decode_step(fields.get(b"body", b""))
        except WireError as error:
            log.warning("entry %s of the step log is left out: %s", entry_id, error)
