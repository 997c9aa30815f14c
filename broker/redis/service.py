"""What every service asks of a run: its record and state, heartbeats, orders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast, get_args

from broker.api import Fence, Order, Peer, RunRecord, RunState, RunStatus
from broker.bounds import MAX_MOVES, MAX_ORDERS, MAX_PEERS, SILENT_MS
from broker.leases import counted
from broker.redis.link import Fields, Link, stream_entries, text
from broker.redis.records import decode_peer, encode_peer
from headrace.errors import WireError

DEFAULT_LEASE_S = 10.0
"""Of a service that takes tasks before its first heartbeat."""


class RedisService:
    """ServicePort on Redis."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._lease_s = DEFAULT_LEASE_S
        self._fence: Fence | None = None
        """Of a trainer, whose heartbeats are refused once its name is its successor's."""
        self._orders_from: str | None = None
        """Where a reader that asks for "$" goes on, so that nothing falls between two calls."""

    async def record(self) -> RunRecord:
        return await self._link.record()

    async def state(self) -> RunState:
        names = ("status", "reason", "incarnation", "step", "cursor")
        values = await self._link.ask("HMGET", self._link.keys.of("state"), *names)
        status = text(values[0])
        if status not in get_args(RunStatus):
            raise WireError(f"run {self._link.run_id} has the unknown status {status!r}")
        return RunState(cast(RunStatus, status), text(values[1]), *(int(value or 0) for value in values[2:]))

    async def now_ms(self) -> int:
        """Redis's clock, milliseconds since the epoch: that of every deadline."""
        seconds, micros = await self._link.send("TIME")
        return int(seconds) * 1000 + int(micros) // 1000

    async def heartbeat(self, peer: Peer, lease_s: float) -> None:
        self._lease_s = lease_s
        key = self._link.keys.beats + peer.name
        said = milliseconds(lease_s), encode_peer(peer), int(peer.role == "producer")
        right = () if self._fence is None else (self._fence.incarnation, self._fence.nonce)
        await self._link.script("heartbeat", peer.name, key, *said, MAX_PEERS, SILENT_MS, *right)

    async def retire(self, name: str) -> None:
        await self._link.script("retire", name, self._link.keys.beats + name)

    async def peers(self) -> list[Peer]:
        rows = await self._link.script("peers", self._link.keys.beats, SILENT_MS)
        peers = [decode_peer(text(name), said, bool(alive)) for name, said, alive in rows]
        return sorted((peer for peer in peers if peer is not None), key=lambda peer: peer.name)

    async def orders(self, after: str, block_ms: int) -> list[Order]:
        stream = self._link.keys.of("orders")
        if after == "$":
            after = self._orders_from or await self._newest(stream)
            self._orders_from = after
        reply = await self._link.send(
            "XREAD", "COUNT", 64, "BLOCK", self._link.block_ms(block_ms), "STREAMS", stream, after
        )
        orders = [_order(entry_id, fields) for entry_id, fields in stream_entries(reply)]
        if orders and self._orders_from is not None:
            self._orders_from = orders[-1].order_id
        return orders

    async def order(self, order: Order) -> None:
        await self._link.script("order", order.kind, order.target, order.count, order.reason, MAX_ORDERS)

    async def line_up(self, device: str, holder: str, lease_s: float) -> tuple[str, ...]:
        return await self._line(device, holder, milliseconds(lease_s))

    async def step_aside(self, device: str, holder: str) -> tuple[str, ...]:
        return await self._line(device, holder, 0)

    async def wait_line(self, device: str, seen: tuple[str, ...], block_ms: int) -> tuple[str, ...]:
        stream = self._link.keys.of("moves")
        # The place in the stream first, then the line: a move between the two is not missed.
        place = await self._newest(stream)
        line = await self._line(device, "", 0)
        if block_ms < 1 or line != seen:
            return line
        await self._link.send("XREAD", "COUNT", 1, "BLOCK", self._link.block_ms(block_ms), "STREAMS", stream, place)
        return await self._line(device, "", 0)

    async def _line(self, device: str, holder: str, lease_ms: int) -> tuple[str, ...]:
        return tuple(map(text, await self._link.script("line", device, holder, lease_ms, MAX_MOVES)))

    def watch(self, on_outage: Callable[[str], None]) -> None:
        self._link.connection.waits.on_outage = on_outage

    def hasten(self) -> None:
        self._link.connection.hasten()

    async def close(self) -> None:
        await self._link.connection.close()

    async def _newest(self, stream: str) -> str:
        """Id of the newest entry, after which a reader sees only later ones."""
        newest = await self._link.send("XREVRANGE", stream, "+", "-", "COUNT", 1)
        return text(newest[0][0]) if newest else "0"


def _order(entry_id: str, fields: Fields) -> Order:
    """An entry that is no order has an empty kind, which nobody obeys; its id still moves the reader on."""
    count = counted(text(fields.get(b"count")))
    kind = "" if count is None else text(fields.get(b"kind"))
    return Order(entry_id, cast(Any, kind), text(fields.get(b"target")), count or 0, text(fields.get(b"reason")))


def milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))
