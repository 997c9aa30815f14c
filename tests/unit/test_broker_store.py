"""What the broker in memory keeps of a run, and how it lets one wait."""

from __future__ import annotations

import asyncio

import pytest

from broker.api import Peer, RunRecord
from broker.bounds import MAX_MANIFESTS, MAX_PEERS, SILENT_MS
from broker.memory import service, store, weights
from broker.memory.runs import MemoryRun
from broker.memory.store import RunStore
from headrace.version import PolicyVersion


class Clock:
    def __init__(self) -> None:
        self.ms = 0

    def __call__(self) -> int:
        return self.ms


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (service, store, weights):
        monkeypatch.setattr(module, "now_ms", clock)
    return clock


@pytest.fixture
def run(record: RunRecord) -> MemoryRun:
    return MemoryRun(record.run_id, RunStore(record), 3)


async def test_services_that_fell_silent_are_forgotten_once_there_are_too_many(run: MemoryRun, clock: Clock) -> None:
    async def beat(name: str) -> None:
        await run.heartbeat(Peer(name, "producer", "host", 1, True, {}), 1.0)

    for number in range(MAX_PEERS):
        await beat(f"p{number}")
        await run.lease(PolicyVersion(1, number), "reader", 1.0)
    clock.ms = SILENT_MS
    await beat("late")
    assert (len(run.store.peers), set(run.store.beats)) == (MAX_PEERS + 1, {"late"})
    clock.ms += 1
    await beat("later")
    assert set(run.store.peers) == {"late", "later"}
    await run.lease(PolicyVersion(1, 0), "later", 1.0)
    assert set(run.store.leases) == {(PolicyVersion(1, 0), "later")}


async def test_those_that_are_alive_are_kept_however_many(run: MemoryRun, clock: Clock) -> None:
    for number in range(MAX_PEERS + 3):
        await run.heartbeat(Peer(f"p{number}", "producer", "host", 1, True, {}), 1.0)
    assert len(await run.peers()) == MAX_PEERS + 3
    assert all(peer.alive for peer in await run.peers())


async def test_manifests_of_versions_that_were_only_announced_are_bounded(run: MemoryRun) -> None:
    fence = await run.take_fence(0)
    for number in range(MAX_MANIFESTS + 1):
        await run.announce(fence, PolicyVersion(1, number), b"manifest")
    assert len(run.store.manifests) == MAX_MANIFESTS
    assert await run.manifest(PolicyVersion(1, 0)) is None


@pytest.mark.parametrize("turns", range(4))
async def test_a_cancellation_that_comes_with_what_is_waited_for_is_not_lost(run: MemoryRun, turns: int) -> None:
    found: list[int] = []
    waiting = asyncio.create_task(run.store.wait(lambda: found, 60_000))
    for _ in range(3):
        await asyncio.sleep(0)
    found.append(1)
    run.store.wake()
    for _ in range(turns):
        await asyncio.sleep(0)
    asked = waiting.cancel()
    await asyncio.wait({waiting})
    assert waiting.cancelled() == asked
