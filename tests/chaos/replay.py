"""Feeding the archive to a trainer that nothing interrupts: it must end with the same weights, bit for bit."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from broker.api import RunRecord
from broker.codec import encode_step
from broker.connect import connect_runs
from broker.keys import Keys
from broker.messages import StepRecord
from consumers import checkpoint
from deploy.processes import Child, Command
from tests.chaos.archive import Entry
from tests.chaos.processes import MARK
from tests.chaos.server import Server
from tests.chaos.world import World

REPLAY_S = 900.0
PAGE = 256


async def replay_wrong(world: World) -> list[str]:
    """What of the run's last checkpoint an uninterrupted trainer did not find, too."""
    history = world.archive.history
    folder = await _replayed(world, history)
    return difference(Path(world.record.folder), folder, len(history))


async def _replayed(world: World, history: Sequence[StepRecord]) -> Path:
    """The run folder of a trainer that made all steps in one go."""
    trained = {entry.entry_id for record in history for entry in record.entries if entry.verdict == "trained"}
    groups = [entry for entry in world.archive.entries() if entry[0] in trained]
    assert len(groups) == len(trained), f"the archive lacks {len(trained) - len(groups)} of the groups that it trained"
    folder = world.folder / "replay"
    config = {**world.record.config, "run": {**world.record.config["run"], "steps": len(history)}}
    record = replace(world.record, folder=str(folder), config=config)
    async with world.server.client() as client:
        reigns = await client.hgetall(Keys(record.run_id).of("reigns"))
    server = Server(world.folder / "replay-redis")
    await server.start()
    try:
        async with server.client() as client:
            await _feed(client, server.url, record, history, groups, reigns)
        await _train(server, record.run_id, world.folder / "logs" / "replay.log")
    finally:
        server.crash()
    return folder


async def _feed(
    client: Any,
    url: str,
    record: RunRecord,
    history: Iterable[StepRecord],
    groups: Sequence[Entry],
    reigns: dict[bytes, bytes],
) -> None:
    """A run that looks as if its trainer had died after logging all steps and before its first checkpoint."""
    runs = connect_runs(url)
    await runs.create(record)
    await runs.close()
    keys = Keys(record.run_id)
    if reigns:
        await client.hset(keys.of("reigns"), mapping=reigns)
    for step in history:
        body = encode_step(step)
        await client.xadd(keys.of("steps"), {"version": str(step.version), "body": body})
    for entry_id, fields in groups:
        await client.xadd(keys.of("groups"), fields, entry_id)
        await client.hset(keys.of("open"), fields[b"task"], f"train g {entry_id}")
        await client.hincrby(keys.of("sheet"), "train admitted")
    while await client.xreadgroup("trainer", "archive", {keys.of("groups"): ">"}, PAGE):
        pass


async def _train(server: Server, run_id: str, log: Path) -> None:
    environ = {"HEADRACE_REDIS_URL": server.url, "HEADRACE_RUN": run_id, "OMP_NUM_THREADS": "1", MARK: run_id}
    trainer = Child.spawn(Command((sys.executable, "-m", "consumers", "--resume"), environ, log))
    try:
        async with asyncio.timeout(REPLAY_S):
            code = await trainer.exited()
        assert code == 0, "\n".join(["the replaying trainer failed:", *trainer.tail()])
    finally:
        trainer.kill()
        trainer.close()


def difference(ran: Path, replayed: Path, steps: int) -> list[str]:
    """Of the newest checkpoints of two run folders: names of tensors that are not the same bits."""
    loaded = []
    for folder in (ran, replayed):
        found = checkpoint.newest(folder)
        assert found is not None, f"there is no checkpoint in {folder}"
        if found[0].step != steps:
            return [f"the newest checkpoint in {folder} is of step {found[0].step}, not {steps}"]
        loaded.append(checkpoint.load(found[1]))
    wrong = []
    for what, ours, theirs in (
        ("model", loaded[0].model, loaded[1].model),
        ("optimizer", loaded[0].optimizer, loaded[1].optimizer),
    ):
        if ours.keys() != theirs.keys():
            wrong.append(f"{what}: the replay has other tensors")
        wrong += [
            f"{what}: {name} differs after the replay"
            for name in sorted(ours.keys() & theirs.keys())
            if not torch.equal(_bits(ours[name]), _bits(theirs[name]))
        ]
    return wrong


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes: a comparison of numbers would take 0 and -0 for the same, and NaN for another."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)
