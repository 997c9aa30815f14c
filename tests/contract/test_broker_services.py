"""What every broker does for services: heads and leases of weight versions, peers, orders, runs beside each other."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from broker.api import Order, Peer, RunRecord, Runs, Versions
from broker.bounds import MAX_PINS, SECRET_BYTES
from broker.connect import Run, connect_run
from headrace.errors import Refused
from headrace.version import PolicyVersion
from tests.conftest import BROKER, Services
from tests.support import make_task, wait_until

LEASE_S = 30.0
Waits = Callable[[], Awaitable[bool]]


async def beat(run: Run, name: str, lease_s: float = LEASE_S) -> None:
    await run.heartbeat(Peer(name, "producer", "host", 1, True, {"busy": 3}), lease_s)


async def test_the_head_moves_forward_only_and_wakes(service: Services, patient: Run, somebody_waits: Waits) -> None:
    trainer, reader = service(), service()
    fence = await trainer.take_fence(0)
    assert await reader.wait_head(None, 0) is None
    waiting = asyncio.create_task(patient.wait_head(None, 60_000))
    await wait_until(somebody_waits, "the reader waits")
    await trainer.publish_head(fence, PolicyVersion(1, 9), b"nine")
    assert await asyncio.wait_for(waiting, 20) == PolicyVersion(1, 9)
    await trainer.publish_head(fence, PolicyVersion(1, 10), b"ten")
    await trainer.publish_head(fence, PolicyVersion(1, 8), b"eight")
    assert await reader.head() == PolicyVersion(1, 10)
    assert await reader.wait_head(PolicyVersion(1, 9), 500) == PolicyVersion(1, 10)
    assert await reader.wait_head(PolicyVersion(1, 10), 10) == PolicyVersion(1, 10)
    assert await reader.manifest(PolicyVersion(1, 8)) == b"eight"
    assert await reader.versions() == {PolicyVersion(1, step) for step in (8, 9, 10)}
    await reader.forget(PolicyVersion(1, 8))
    assert await reader.versions() == {PolicyVersion(1, step) for step in (9, 10)}
    assert await reader.manifest(PolicyVersion(1, 8)) is None


async def test_version_leases_end(service: Services) -> None:
    run = service()
    await run.lease(PolicyVersion(1, 2), "p0", LEASE_S)
    await run.lease(PolicyVersion(1, 2), "p1 on host b", LEASE_S)
    await run.lease(PolicyVersion(1, 3), "p0", 0.02)
    assert (await run.leased())[PolicyVersion(1, 2)] == ["p0", "p1 on host b"]

    async def short_one_ended() -> bool:
        return PolicyVersion(1, 3) not in await run.leased()

    await wait_until(short_one_ended, "the short lease ends")
    await run.release(PolicyVersion(1, 2), "p0")
    assert await run.leased() == {PolicyVersion(1, 2): ["p1 on host b"]}


async def test_peers_and_their_heartbeats(service: Services) -> None:
    run = service()
    await beat(run, "p1")
    await beat(run, "p0", 0.02)

    async def one_is_silent() -> bool:
        return [(peer.name, peer.alive) for peer in await run.peers()] == [("p0", False), ("p1", True)]

    await wait_until(one_is_silent, "p0's heartbeat ends")
    assert (await run.peers())[1].state == {"busy": 3}
    await run.retire("p1")
    assert [peer.name for peer in await run.peers()] == ["p0"]


async def test_orders_reach_whoever_reads(service: Services) -> None:
    operator, reader = service(), service()
    await operator.order(Order("", "scale", count=1))
    assert await reader.orders("$", 0) == []
    await operator.order(Order("", "scale", count=2, reason="more"))
    (order,) = await reader.orders("$", 500)
    assert (order.kind, order.count, order.reason) == ("scale", 2, "more")
    assert await reader.orders(order.order_id, 0) == []
    assert len(await reader.orders("0", 0)) == 2
    await operator.order(Order("", "rollback", target="1.8", reason="a mark"))
    (order,) = await reader.orders("$", 500)
    assert (order.kind, order.target, order.reason) == ("rollback", "1.8", "a mark")


async def test_the_end_is_a_message(service: Services) -> None:
    trainer, reader = service(), service()
    fence = await trainer.take_fence(0)
    await trainer.set_step(fence, 12)
    await reader.orders("$", 0)
    await trainer.finish(fence, "finished", "all steps done")
    (order,) = await reader.orders("$", 500)
    assert (order.kind, order.reason) == ("end", "all steps done")
    state = await reader.state()
    assert (state.status, state.reason, state.step) == ("finished", "all steps done", 12)
    await trainer.take_fence(0)
    assert (await reader.state()).status == "running"
    await reader.set_status("stopping", "asked")
    assert (await reader.state()).status == "stopping"


async def test_runs_do_not_see_each_other(
    service: Services, any_runs: Runs, broker_url: str, record: RunRecord
) -> None:
    other_record = replace(record, run_id=f"{record.run_id}-other")
    await any_runs.create(other_record)
    with pytest.raises(Refused, match="taken"):
        await any_runs.create(other_record)
    other = connect_run(broker_url, other_record.run_id, BROKER)
    try:
        await other.admit(await other.take_fence(0), [make_task("a")])
        producer = service()
        await beat(producer, "p0")
        assert await producer.take("p0", 1, 0) == []
        assert {record.run_id, other_record.run_id} <= set(await any_runs.ids())
        assert await other.record() == replace(other_record, created_ms=(await other.record()).created_ms)
        assert await any_runs.delete(other_record.run_id) > 0
        with pytest.raises(Refused, match=r"no run|was deleted"):
            await other.take("p0", 1, 0)
        with pytest.raises(Refused, match=r"no run|was deleted"):
            await other.state()
    finally:
        await other.close()


async def test_a_run_goes_on_with_an_amended_record(service: Services, any_runs: Runs, record: RunRecord) -> None:
    before = await service().record()
    config = {**before.config, "run": {**before.config["run"], "steps": 7}}
    await any_runs.amend(replace(before, config=config))
    after = await service().record()
    assert after == replace(before, config=config)
    assert after.config["run"]["steps"] == 7
    with pytest.raises(Refused, match="there is no run 'nowhere'"):
        await any_runs.amend(replace(record, run_id="nowhere"))
    assert "nowhere" not in await any_runs.ids()


async def test_a_version_that_is_being_published_is_told_of(
    service: Services, patient: Run, somebody_waits: Waits
) -> None:
    trainer, reader = service(), service()
    fence = await trainer.take_fence(0)
    assert await reader.wait_versions(Versions(), 0) == Versions()
    waiting = asyncio.create_task(patient.wait_versions(Versions(), 60_000))
    await wait_until(somebody_waits, "the reader waits")
    await trainer.announce(fence, PolicyVersion(1, 3), b"open")
    coming = Versions(None, PolicyVersion(1, 3))
    assert await asyncio.wait_for(waiting, 20) == coming
    assert await reader.manifest(PolicyVersion(1, 3)) == b"open"
    assert await reader.head() is None
    assert await reader.wait_head(None, 20) is None
    waiting = asyncio.create_task(patient.wait_versions(coming, 60_000))
    await wait_until(somebody_waits, "the reader waits")
    await trainer.publish_head(fence, PolicyVersion(1, 3), b"sealed")
    assert await asyncio.wait_for(waiting, 20) == Versions(PolicyVersion(1, 3), PolicyVersion(1, 3))
    assert await reader.manifest(PolicyVersion(1, 3)) == b"sealed"


async def test_all_services_of_a_run_have_one_secret(service: Services) -> None:
    secret = await service().secret()
    assert len(secret) == SECRET_BYTES
    assert await service().secret() == secret


async def test_pins_are_kept_until_they_are_let_go(service: Services) -> None:
    port = service()
    for step in range(MAX_PINS):
        await port.pin(PolicyVersion(1, step))
    await port.pin(PolicyVersion(1, 0))
    with pytest.raises(Refused, match="pinned already"):
        await port.pin(PolicyVersion(1, MAX_PINS))
    assert await port.unpin(PolicyVersion(1, 0))
    assert not await port.unpin(PolicyVersion(1, 0))
    assert await port.pinned() == {PolicyVersion(1, step) for step in range(1, MAX_PINS)}
