"""What every service asks of a run in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from broker.api import Fence, Order, Peer, RunRecord, RunState
from broker.bounds import MAX_PEERS, SILENT_MS
from broker.memory.store import RunStore, now_ms
from headrace.errors import Fenced, Refused


class MemoryService:
    """ServicePort in memory."""

    def __init__(self, run_id: str, store: RunStore | None) -> None:
        self._run_id = run_id
        self._store = store
        self._lease_s = 10.0
        self._fence: Fence | None = None
        """Of a trainer, whose heartbeats are refused once its name is its successor's."""
        self._orders_from: str | None = None

    async def record(self) -> RunRecord:
        return self.store.record

    async def state(self) -> RunState:
        return self.store.state

    async def now_ms(self) -> int:
        return now_ms()

    async def heartbeat(self, peer: Peer, lease_s: float) -> None:
        if self._fence is not None:
            self.fenced(self._fence)
        self._lease_s = lease_s
        store, now = self.store, now_ms()
        store.peers[peer.name] = now, peer
        if len(store.peers) > MAX_PEERS:
            store.peers = {name: said for name, said in store.peers.items() if now - said[0] <= SILENT_MS}
        self._beat(peer.name)

    async def retire(self, name: str) -> None:
        self.store.peers.pop(name, None)
        self.store.beats.pop(name, None)

    async def peers(self) -> list[Peer]:
        store, now = self.store, now_ms()
        for name, (said_ms, _) in list(store.peers.items()):
            if not store.alive(name) and now - said_ms > SILENT_MS:
                del store.peers[name]
        return [replace(peer, alive=store.alive(name)) for name, (_, peer) in sorted(store.peers.items())]

    async def orders(self, after: str, block_ms: int) -> list[Order]:
        store = self.store
        if after == "$":
            after = self._orders_from or (store.orders[-1].order_id if store.orders else "0")
            self._orders_from = after
        place = number(after)
        found = await store.wait(lambda: [one for one in store.orders if number(one.order_id) > place][:64], block_ms)
        if found and self._orders_from is not None:
            self._orders_from = found[-1].order_id
        return found

    async def order(self, order: Order) -> None:
        self.store.orders.append(replace(order, order_id=self.store.new_id()))
        self.store.wake()

    async def line_up(self, device: str, holder: str, lease_s: float) -> tuple[str, ...]:
        store = self.store
        before = store.line(device, holder)
        store.places[device, holder] = now_ms() + max(1, round(lease_s * 1000))
        if (line := store.line(device, holder)) != before:
            store.wake()
        return line

    async def step_aside(self, device: str, holder: str) -> tuple[str, ...]:
        store = self.store
        if store.places.pop((device, holder), None) is not None:
            store.wake()
        return store.line(device)

    async def wait_line(self, device: str, seen: tuple[str, ...], block_ms: int) -> tuple[str, ...]:
        store = self.store
        await store.wait(lambda: store.line(device) != seen, block_ms)
        return store.line(device)

    def watch(self, on_outage: Callable[[str], None]) -> None:
        """It is never away."""

    def hasten(self) -> None:
        """It is never away."""

    async def close(self) -> None:
        """Nothing is held."""

    @property
    def store(self) -> RunStore:
        """Raises Refused when the run is not there (any more)."""
        if self._store is None or self._store.gone:
            raise Refused(f"there is no run {self._run_id!r} in this process's memory")
        return self._store

    def fenced(self, fence: Fence) -> RunStore:
        """The store, for the holder of the fence only. Raises Fenced."""
        store = self.store
        if (fence.incarnation, fence.nonce) != (store.state.incarnation, store.nonce):
            raise Fenced(
                f"run {self._run_id} now belongs to the trainer of incarnation {store.state.incarnation}; "
                "this one may change nothing"
            )
        return store

    def _beat(self, name: str) -> None:
        store, now = self.store, now_ms()
        store.beats[name] = now + max(1, round(self._lease_s * 1000))
        if len(store.beats) > MAX_PEERS:
            store.beats = {other: end for other, end in store.beats.items() if end > now}


def number(entry_id: str) -> int:
    """The place of an entry id; "" and "0" are before all."""
    return int(entry_id.partition("-")[0] or 0)
