"""A trainer that takes an earlier version's weights back: between two steps, whole, and also when it dies meanwhile."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import torch
from transformers import AutoModelForCausalLM

from broker.api import Order
from broker.connect import Run
from broker.keys import Keys
from consumers import checkpoint
from consumers.contents import tensors_of
from headrace.version import PolicyVersion
from tests.trainers import Begin, Trainers, events, lines, wait_until
from tests.weights import LAYOUT, flip
from weightsync.arena import Arena
from weightsync.manifest import Manifest, Part, decode, encode
from weightsync.transports.api import Unavailable
from weightsync.whole import read_whole

pytestmark = pytest.mark.timeout(240)
ROOM = 200_000
"""Bytes of a file: more than a version of the tiny model has, less than its checkpoint."""
Weights = dict[str, torch.Tensor]


@pytest.fixture
def arena(tmp_path: Path) -> Arena:
    return Arena(run_folder=tmp_path / "run")


@pytest.fixture(autouse=True)
def pins_are_let_go(run_id: str, arena: Arena) -> Iterator[None]:
    yield
    arena.sweep(run_id)


async def pinned_head(port: Run) -> tuple[PolicyVersion, Weights]:
    """The newest version, kept, and its weights as they were published."""
    version = await port.head()
    assert version is not None
    await port.pin(version)
    read = await read_whole(await manifest(port, version), Arena())
    assert not isinstance(read, Unavailable), read
    return version, tensors_of((await manifest(port, version)).layout, read)


async def manifest(port: Run, version: PolicyVersion) -> Manifest:
    data = await port.manifest(version)
    assert data is not None
    return decode(data)


async def roll_back(port: Run, version: object, mark: str) -> dict[str, str]:
    """What the trainer answers."""
    await port.order(Order("", "rollback", target=str(version), reason=mark))
    found: dict[str, str] = {}

    async def answered() -> bool:
        for peer in await port.peers():
            found.update(peer.state.get("answers", {}).get(mark, {}))
        return bool(found)

    await wait_until(answered, f"the rollback to {version} is answered")
    return found


def same(ours: Weights, theirs: Weights) -> bool:
    """Bit by bit, once ours are rounded as they travel."""
    assert ours.keys() == theirs.keys()
    return all(torch.equal(ours[name].to(theirs[name].dtype), theirs[name]) for name in theirs)


def weights_of(folder: Path, version: str) -> Weights:
    """Of a checkpoint, which has no moments."""
    loaded = checkpoint.load(checkpoint.folder_of(folder, PolicyVersion.parse(version)))
    assert set(loaded.optimizer) == {"random.cpu"}
    return loaded.model


@pytest.mark.parametrize("ranks", [1, 2])
async def test_weights_are_taken_back_to_the_last_step(begin: Begin, trainers: Trainers, ranks: int) -> None:
    """Producers stand still meanwhile, so that each step is a rollback, and groups are left over at the end."""
    port, player, folder = await begin(run={"steps": 8}, checkpoint={"keep": 9}, trainer={"parallel": "fsdp"})
    processes = trainers.start_ranks(ranks)
    await wait_until(lambda: len(lines(folder)) >= 1, "a step is made")
    version, weights = await pinned_head(port)
    await wait_until(lambda: len(lines(folder)) >= version.step + 2, "two more steps are made")
    player.paused = True
    made: list[str] = []
    while not made or int(made[-1].partition(".")[2]) < 8:
        answer = await roll_back(port, version, f"mark {len(made)}")
        assert list(answer) == ["version"], answer
        made.append(answer["version"])
        assert same(weights_of(folder, made[-1]), weights)
    records = {str(record.version): record for record in await port.steps_after(0)}
    assert [records[name].restored for name in made] == [version] * len(made)
    assert all(records[name].entries == () for name in made)
    refused = await roll_back(port, version, "too late")
    assert refused == {"refused": "the run is at its end: all 8 steps are made"}
    player.paused, player.may_be_superseded = False, True
    for process in processes:
        stderr = await trainers.end(process)
        assert process.returncode == 0, stderr

    assert [line["step"] for line in lines(folder)] == list(range(1, 9))
    assert [line["version"] for line in lines(folder) if line.get("restored") == str(version)] == made
    summary = json.loads((folder / "summary.json").read_text())
    sheet = summary["balance"]["train"]
    assert sheet["verdicts"]["trained"] == 2 * (8 - len(made))
    left = sheet["verdicts"]["filtered"]
    assert sheet["reasons"]["filtered: the run made its last step without it"] == left > 0
    assert (sheet["closed"], sheet["outstanding"]) == (True, 0)
    exported = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.bfloat16)
    assert same(dict(exported.named_parameters()), weights)


async def test_what_cannot_be_had_is_refused_and_training_goes_on(
    begin: Begin, trainers: Trainers, redis_server: Any, run_id: str, arena: Arena
) -> None:
    port, player, folder = await begin(
        run={"steps": 4000}, checkpoint={"every": 5, "keep": 1000}, evaluation={"prompts": 0}
    )
    process = trainers.start()
    await wait_until(lambda: len(lines(folder)) >= 1, "a step is made")
    version, _ = await pinned_head(port)
    while version.step % 5 == 0:
        version, _ = await pinned_head(port)
    player.paused = True
    assert "1.99 is not in any host's memory" in (await roll_back(port, "1.99", "a"))["refused"]
    segment = arena.folder / (await manifest(port, version)).parts[0].segment
    flip(segment, 1000)
    damaged = (await roll_back(port, version, "b"))["refused"]
    assert f"version {version} is damaged in the memory of this host: the digest of chunk 0 (" in damaged
    assert damaged.endswith("; and the run's folder has no checkpoint of exactly that version")
    flip(segment, 1000)
    other = Manifest(PolicyVersion(7, 7), LAYOUT, (Part("here", "segment"),), False, run_id)
    with redis.Redis.from_url(redis_server.admin_url) as client:
        client.hset(Keys(run_id).of("manifests"), "7.7", encode(other))
    assert "version 7.7 has another layout" in (await roll_back(port, "7.7", "c"))["refused"]
    before = len(lines(folder))
    player.paused = False
    await wait_until(lambda: len(lines(folder)) > max(7, before), "it goes on")
    assert not any("restored" in line for line in lines(folder))

    # Long freed, but there is a checkpoint of it.
    await wait_until(lambda: not any(name.version.step == 5 for name in arena.segments(run_id)), "1.5 is freed")
    player.paused = True
    assert list(answer := await roll_back(port, "1.5", "d")) == ["version"], answer
    loaded = checkpoint.load(checkpoint.folder_of(folder, PolicyVersion(1, 5)))
    rounded = {name: tensor.to(torch.bfloat16) for name, tensor in loaded.model.items()}
    assert same(weights_of(folder, answer["version"]), rounded)
    process.send_signal(signal.SIGTERM)
    assert await trainers.end(process) is not None
    assert process.returncode == 0


async def killed_before_its_checkpoint(
    port: Run, player: Any, folder: Path, trainers: Trainers
) -> tuple[int, PolicyVersion, Weights]:
    """A rollback that found no room on the disk for its checkpoint. Returns its step, and what it took back."""
    process: subprocess.Popen[str] = trainers.start()
    await wait_until(lambda: len(lines(folder)) >= 1, "a step is made")
    version, weights = await pinned_head(port)
    await wait_until(lambda: len(lines(folder)) >= version.step + 2, "two more steps are made")
    player.paused = True
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (ROOM, ROOM))
    await port.order(Order("", "rollback", target=str(version), reason="mark"))

    async def waits() -> bool:
        return any(peer.state.get("phase") == "wait_checkpoint" for peer in await port.peers())

    await wait_until(waits, "it waits for room")
    step = len(lines(folder)) + 1
    assert (await port.steps_after(step - 1))[0].restored == version
    head = await port.head()
    assert head is not None
    assert head.step < step, "nobody samples from it before a checkpoint contains it"
    process.send_signal(signal.SIGKILL)
    process.wait(20)
    return step, version, weights


async def test_a_rollback_is_made_again_after_a_crash(begin: Begin, trainers: Trainers) -> None:
    port, player, folder = await begin(run={"steps": 40}, checkpoint={"every": 1000}, evaluation={"prompts": 0})
    step, version, weights = await killed_before_its_checkpoint(port, player, folder, trainers)
    again = trainers.start("--resume")

    async def published() -> bool:
        return (await port.head() or version).incarnation == 2

    await wait_until(published, "the next trainer has published")
    assert await port.head() == PolicyVersion(2, step)
    assert same(weights_of(folder, f"2.{step}"), weights)
    replayed = [event for event in events(folder) if event["event"] == "replayed"]
    assert [event["step"] for event in replayed] == list(range(1, step + 1))
    assert replayed[-1]["restored"] == str(version)
    assert lines(folder)[-1]["restored"] == str(version)
    player.paused = False
    await wait_until(lambda: len(lines(folder)) > step, "it goes on")
    again.send_signal(signal.SIGTERM)
    assert await trainers.end(again) is not None
    assert again.returncode == 0
    sheet = next(sheet for sheet in await port.balance() if sheet.kind == "train")
    assert sheet.closed


async def test_the_history_forks_where_the_weights_are_gone(
    begin: Begin, trainers: Trainers, run_id: str, arena: Arena
) -> None:
    port, player, folder = await begin(run={"steps": 40}, checkpoint={"every": 1000}, evaluation={"prompts": 0})
    step, version, _ = await killed_before_its_checkpoint(port, player, folder, trainers)
    for name in arena.segments(run_id):
        if name.version == version:
            arena.remove(name)
    again = trainers.start("--resume")
    await wait_until(lambda: any(event["event"] == "forked" for event in events(folder)), "it says that it forks")
    (fork,) = [event for event in events(folder) if event["event"] == "forked"]
    assert fork["step"] == step - 1
    assert fork["reason"].startswith(f"step {step} restored weights that cannot be had again: version {version} is not")
    player.paused = False
    await wait_until(lambda: lines(folder)[-1]["step"] >= step, "it goes on")
    assert not any("restored" in line for line in lines(folder))
    again.send_signal(signal.SIGTERM)
    assert await trainers.end(again) is not None
    assert again.returncode == 0
