"""A trainer that shares its device: it computes in its turn only, and holds nobody up otherwise."""

from __future__ import annotations

import signal
from pathlib import Path

from broker.connect import Run
from broker.turns import shared_device
from headrace.config import Config
from headrace.hosts import host_name
from tests.trainers import Begin, Trainers, lines, wait_until

TURNS = {"run": {"placement": "colocated"}, "evaluation": {"prompts": 0}, "producer": {"lease_s": 60.0}}


async def phase(port: Run) -> str:
    return next((str(peer.state.get("phase")) for peer in await port.peers() if peer.role == "trainer"), "")


async def device_of(port: Run) -> str:
    return shared_device(Config.model_validate((await port.record()).config), host_name())


async def test_it_makes_a_step_only_in_its_turn_and_gives_it_up_in_between(begin: Begin, trainers: Trainers) -> None:
    port, player, folder = await begin(**TURNS)
    device = await device_of(port)
    await port.line_up(device, "engine", 600.0)
    process = trainers.start()

    async def waits() -> bool:
        return len(await port.line_up(device, "engine", 600.0)) == 2

    await wait_until(waits, "the trainer stands in line behind the engine")
    assert lines(folder) == []
    player.paused = True
    await port.step_aside(device, "engine")
    await wait_until(lambda: len(lines(folder)) >= 1, "a step is made in its turn")

    async def gave_up() -> bool:
        return await phase(port) == "wait_groups" and await port.wait_line(device, (), 0) == ()

    await wait_until(gave_up, "it has no turn while it waits for groups")
    player.paused = False
    stderr = await trainers.end(process)
    assert process.returncode == 0, stderr
    assert [line["step"] for line in lines(folder)] == list(range(1, 7))
    assert await port.wait_line(device, (), 0) == ()


async def test_one_that_is_told_to_leave_while_it_waits_for_its_turn_leaves_its_groups_for_the_next(
    begin: Begin, trainers: Trainers, tmp_path: Path
) -> None:
    port, _, folder = await begin(**TURNS)
    device = await device_of(port)
    await port.line_up(device, "engine", 600.0)
    process = trainers.start()

    async def waits() -> bool:
        return await phase(port) == "wait_device"

    await wait_until(waits, "it waits for its turn")
    process.send_signal(signal.SIGTERM)
    stderr = await trainers.end(process)
    assert process.returncode == 0, stderr
    assert lines(folder) == []
    assert await port.step_aside(device, "engine") == ()
    following = trainers.start("--resume")
    stderr = await trainers.end(following)
    assert following.returncode == 0, stderr
    assert [line["step"] for line in lines(folder)] == list(range(1, 7))
