"""A trainer that was stopped, lost the run to another one and wakes up again changes nothing."""

from __future__ import annotations

import hashlib
import os
import signal
from pathlib import Path

import psutil
import pytest
import redis

from headrace.errors import Fenced
from tests.trainers import Begin, Trainers, events, lines, wait_until
from tests.warm import WarmProcess

STOPS = """
import os, signal
import {module} as module
owner = {owner}
original = owner.{name}

def stops_once(*args, **kwargs):
    if {when}:
        owner.{name} = original
        os.kill(os.getpid(), signal.SIGSTOP)
    return original(*args, **kwargs)

owner.{name} = stops_once
"""

POINTS = {
    "in a step": ("consumers.trainer", "module.Trainer", "train", "args[2] == 3"),
    "before the line of a step": ("consumers.lines", "module.Lines", "write", "kwargs.get('step') == 3"),
    "before a heartbeat": ("broker.redis.trainer", "module.RedisTrainer", "heartbeat", "True"),
    "before a checkpoint is in its place": ("consumers.placing", "module", "place", "args[1].name == '00000004'"),
    "before the model is in its place": ("consumers.placing", "module", "place", "args[1].name == 'model'"),
}


def start_one_that_stops(trainers: Trainers, point: str) -> WarmProcess:
    module, owner, name, when = POINTS[point]
    return trainers.start(first=STOPS.format(module=module, owner=owner, name=name, when=when))


def files(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def keys(url: str, run_id: str) -> dict[bytes, bytes]:
    """All but heartbeats, which run out by themselves."""
    with redis.Redis.from_url(url) as client:
        found = sorted(client.scan_iter(f"{{hr:{run_id}}}:*", count=512))
        return {key: client.dump(key) for key in found if b":beat:" not in key}


@pytest.mark.parametrize("point", POINTS)
async def test_a_trainer_that_wakes_after_it_lost_the_run_changes_nothing(
    point: str, begin: Begin, trainers: Trainers, redis_url: str, run_id: str
) -> None:
    port, player, folder = await begin(checkpoint={"every": 4, "keep": 1}, evaluation={"prompts": 0})
    zombie = start_one_that_stops(trainers, point)
    await wait_until(lambda: psutil.Process(zombie.pid).status() == psutil.STATUS_STOPPED, f"it stops {point}")
    second = trainers.start("--resume")
    stderr = await trainers.end(second)
    assert second.returncode == 0, stderr
    assert [line["step"] for line in lines(folder)] == [1, 2, 3, 4, 5, 6]
    assert (await port.state()).status == "finished"
    player.ended.set()
    await player.left.wait()
    before = files(folder), keys(redis_url, run_id), await port.head()
    assert before[2] is not None
    assert before[2].incarnation == 2

    os.kill(zombie.pid, signal.SIGCONT)
    stderr = await trainers.end(zombie)
    assert zombie.returncode == Fenced.exit_code, stderr
    assert "belongs to the trainer of incarnation" in stderr
    assert (files(folder), keys(redis_url, run_id), await port.head()) == before
    assert not [event for event in events(folder) if event["event"] == "forked"]
    sheet = next(sheet for sheet in await port.balance() if sheet.kind == "train")
    assert (sheet.closed, sheet.outstanding, sheet.verdicts) == (True, 0, {"trained": 12})
