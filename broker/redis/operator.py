"""What the command line asks of a run: balance sheet, depths, finished rollouts."""

from __future__ import annotations

from typing import get_args

from redis import exceptions

from broker.api import Balance, RunStatus
from broker.arrivals import limits_of
from broker.bounds import KEEP_ENDED_MS
from broker.looks import OpenTask, QueueDepths
from broker.messages import GroupDelivery, TaskKind
from broker.redis.failures import worth_waiting
from broker.redis.link import Link, stream_entries, text
from broker.redis.service import RedisService
from broker.redis.taking import arrival_of, small
from broker.sheet import balances
from headrace.errors import WireError

PAGE = 16
"""Groups that `finished` reads at once."""


class RedisOperator(RedisService):
    """OperatorPort on Redis."""

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        self._finished_from: str | None = None

    async def balance(self) -> list[Balance]:
        found = await self._balance()
        if self._link.mends is not None and not all(sheet.closed for sheet in found):
            # Entries were deleted by hand: as if Redis had lost them.
            self._link.connection.epoch += 1
            found = await self._balance()
        return found

    async def _balance(self) -> list[Balance]:
        while True:
            epoch = self._link.connection.epoch
            sheet, rows = await self._link.script("balance")
            if epoch == self._link.connection.epoch:
                break
            # It was this call that found Redis started anew: the trainer's port has something to put right first.
        counts = {text(name): int(value) for name, value in zip(sheet[::2], sheet[1::2], strict=True)}
        outstanding = {text(kind): int(number) for kind, number in rows}
        return balances(get_args(TaskKind), counts, outstanding)

    async def depths(self) -> QueueDepths:
        return QueueDepths(*await self._link.script("depths"))

    async def oldest_tasks(self, count: int) -> list[OpenTask]:
        rows = await self._link.script("oldest_tasks", count) if count > 0 else []
        return [
            OpenTask(text(task), text(kind), int(text(entry_id).partition("-")[0]), text(holder), int(deliveries))
            for entry_id, task, kind, holder, deliveries in rows
        ]

    async def memory(self) -> tuple[int, int]:
        said = await self._link.send("INFO", "memory")
        return int(said["used_memory"]), int(said["maxmemory"])

    async def refusal(self) -> str:
        async def ask() -> str:
            try:
                # One that cannot write to its disk refuses even this.
                await self._link.once(("PING",))
            except exceptions.ResponseError as error:
                return worth_waiting(error, self._link.place)
            return ""

        return await self._link.call(ask)

    async def set_status(self, status: RunStatus, reason: str) -> None:
        kept_ms = KEEP_ENDED_MS if status in ("finished", "failed") else 0
        await self._link.script("set_status", status, reason, kept_ms)

    async def finished(self, after: str, block_ms: int) -> list[tuple[str, GroupDelivery, str]]:
        """Reads stream `groups` beside the trainer, without taking part in its consumer group.

        The trainer's settling acknowledges a group at once, but deletes it only when 64 later ones are settled: so a
        reader who comes late, or after the run's end, still sees the newest ones, and no body is stored twice.
        `after` is "" from the oldest that is left, "$" only new ones, else a cursor from an earlier call.
        """
        stream = self._link.keys.of("groups")
        if after == "$":
            after = self._finished_from or await self._newest(stream)
            self._finished_from = after
        count = PAGE if await small(self._link) else 1
        reply = await self._link.send(
            "XREAD", "COUNT", count, "BLOCK", self._link.block_ms(block_ms), "STREAMS", stream, after or "0"
        )
        found = []
        limits = limits_of(await self.record())
        for entry_id, fields in stream_entries(reply):
            arrival = arrival_of(entry_id, fields)
            try:
                group = arrival.group(limits)
            except WireError as error:
                group = arrival.refused(str(error))
            found.append((entry_id, GroupDelivery(entry_id, len(arrival.body), group), arrival.producer))
        if found and self._finished_from is not None:
            self._finished_from = found[-1][0]
        return found
