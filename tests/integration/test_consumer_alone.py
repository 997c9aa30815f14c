"""A trainer whose producers are gone, or hold tasks and do nothing."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from broker.api import Peer
from broker.connect import Run
from headrace.errors import ServiceError
from tests.trainers import Begin, Trainers, events, lines, trouble, wait_until


async def beat(port: Run) -> None:
    await port.heartbeat(Peer("player", "producer", "here", os.getpid(), True, {}), 1.0)


@asynccontextmanager
async def beating(port: Run) -> AsyncIterator[None]:
    """A producer that says that it lives."""
    ended = asyncio.Event()

    async def beats() -> None:
        while not ended.is_set():
            await beat(port)
            try:
                async with asyncio.timeout(0.2):
                    await ended.wait()
            except TimeoutError:
                continue

    task = asyncio.create_task(beats())
    try:
        yield
    finally:
        ended.set()
        await task


async def test_a_run_without_producers_says_so_and_goes_on_when_one_comes(begin: Begin, trainers: Trainers) -> None:
    port, player, folder = await begin(evaluation={"prompts": 0})
    player.paused = True
    process = trainers.start()
    async with beating(port):

        async def waits() -> bool:
            return any(peer.role == "trainer" and peer.state["phase"] == "wait_groups" for peer in await port.peers())

        await wait_until(waits, "it has seen a producer and waits for groups")
    said = await trouble(port)
    assert said["kind"] == "producers"
    assert said["reason"].startswith("all producers of this run are gone; it waits for one")
    async with beating(port):
        await wait_until(lambda: len(_said(folder)) == 2, "the trainer says that one is back")
        player.paused = False
        stderr = await trainers.end(process)
    assert process.returncode == 0, stderr
    assert "all producers of this run are gone" in stderr
    assert _said(folder) == ["producers_gone", "producers_back"]
    assert lines(folder)[-1]["producers"] == {"alive": 1, "missing": 0}


def _said(folder: Path) -> list[str]:
    return [event["event"] for event in events(folder) if event["event"].startswith("producers_")]


async def test_a_run_without_producers_ends_where_it_shall(begin: Begin, trainers: Trainers) -> None:
    port, player, folder = await begin(
        run={"steps": 1000},
        trainer={"without_producers": "end", "without_producers_s": 2.0},
        checkpoint={"every": 1000},
        evaluation={"prompts": 0},
    )
    process = trainers.start()
    async with beating(port):
        await wait_until(lambda: len(lines(folder)) >= 1, "a step is made")
        player.paused = True
    stderr = await trainers.end(process)
    assert process.returncode == ServiceError.exit_code, stderr
    assert "no producer has played for this run for" in stderr.splitlines()[-1]
    state = await port.state()
    assert state.status == "failed"
    assert "trainer.without_producers_s" in state.reason
    assert [event["step"] for event in events(folder) if event["event"] == "checkpoint"] == [len(lines(folder))]
    assert [order.kind for order in await port.orders("0", 0)] == ["end"]


async def test_tasks_of_a_producer_that_is_stuck_fail_and_free_their_slots(begin: Begin, trainers: Trainers) -> None:
    """It lives, and never finishes what it took; another one does."""
    port, player, _folder = await begin(
        run={"steps": 3}, broker={"task_deadline_s": 2.0}, producer={"lease_s": 0.6}, evaluation={"prompts": 0}
    )
    player.paused = True
    process = trainers.start()
    async with beating(port):
        stuck = []

        async def took() -> bool:
            stuck.extend(await port.take("stuck", 99, 100))
            return len(stuck) >= 4

        await wait_until(took, "a producer takes all tasks")

        async def given_up() -> bool:
            await port.renew("stuck", [delivery.entry_id for delivery in stuck])
            sheet = next(sheet for sheet in await port.balance() if sheet.kind == "train")
            return sheet.verdicts.get("failed", 0) >= len(stuck)

        await wait_until(given_up, "they fail by rule")
        player.paused = False
        stderr = await trainers.end(process)
    assert process.returncode == 0, stderr
    sheet = next(sheet for sheet in await port.balance() if sheet.kind == "train")
    assert (sheet.closed, sheet.outstanding, sheet.verdicts["trained"]) == (True, 0, 6)
    assert sheet.reasons["failed: no producer finished it within its deadline"] >= 4
    assert await port.publish("stuck", stuck[0], player.failed(stuck[0])) == "superseded"
