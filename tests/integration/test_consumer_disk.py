"""A trainer whose disk is full loses nothing: it goes on while it may, waits, and writes when there is room."""

from __future__ import annotations

import json
import resource
import signal

from tests.trainers import Begin, Trainers, events, lines, trouble, wait_until

ROOM = 200_000
"""Bytes of a file: more than a version of the tiny model has, less than its checkpoint."""


async def test_the_last_checkpoint_waits_for_room(begin: Begin, trainers: Trainers) -> None:
    """A limit on the size of files stands in for a full disk: journals and weights still fit, checkpoints do not."""
    port, player, folder = await begin(checkpoint={"every": 1}, evaluation={"prompts": 0})
    player.paused = True
    process = trainers.start()
    await wait_until((folder / "trainer.jsonl").exists, "it has taken the run")
    unlimited = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (ROOM, unlimited[1]))
    player.paused = False
    await wait_until(lambda: len(lines(folder)) == 6, "all steps are made without a checkpoint")
    assert (await trouble(port))["kind"] == "checkpoint"
    sheet = next(sheet for sheet in await port.balance() if sheet.kind == "train")
    assert sheet.outstanding == 12, "what no checkpoint contains stays in the broker"
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, unlimited)
    stderr = await trainers.end(process)
    assert process.returncode == 0, stderr
    assert f"{folder}/checkpoints/1/" in stderr
    assert "cannot be written: " in stderr
    assert "File too large" in stderr or "file too large" in stderr
    assert "nothing is lost, and it is tried again" in stderr
    assert "over after" in stderr
    assert [event["step"] for event in events(folder) if event["event"] == "checkpoint"] == [6]
    assert json.loads((folder / "summary.json").read_text())["balance"]["train"]["verdicts"] == {"trained": 12}
    assert [path.name for path in folder.glob("checkpoints/1/.*")] == [], "nothing half-written is left"


async def test_without_room_steps_end_at_the_bound_and_nothing_is_lost(begin: Begin, trainers: Trainers) -> None:
    """A megabyte of groups is retained at most: with long rollouts that is a few steps."""
    port, player, folder = await begin(
        run={"steps": 40}, checkpoint={"every": 1000}, evaluation={"prompts": 0}, broker={"retain_bytes": 1 << 20}
    )
    player.completion, player.reward = 3000, 0.0
    # A file in the place of the folder stands in for a full disk.
    (folder / "checkpoints").write_text("")
    process = trainers.start()
    await wait_until(lambda: len(lines(folder)) >= 1, "a step is made")
    waiting = await trouble(port)
    assert waiting["kind"] == "checkpoint"
    state = {}

    async def stands() -> bool:
        state.update(next(peer for peer in await port.peers() if peer.role == "trainer").state)
        return state["phase"] == "wait_checkpoint"

    await wait_until(stands, "it waits for room")
    assert 0 < state["retained_bytes"] <= 1 << 20
    made = len(lines(folder))
    assert made < 20

    process.send_signal(signal.SIGTERM)
    stderr = await trainers.end(process)
    assert process.returncode == 0, stderr
    assert f"leaving without a checkpoint of {made} steps" in stderr
    (folder / "checkpoints").unlink()
    again = trainers.start("--resume")
    await wait_until(lambda: lines(folder)[-1]["step"] > made, "it goes on")
    assert [event["step"] for event in events(folder) if event["event"] == "replayed"] == list(range(1, made + 1))
    again.send_signal(signal.SIGTERM)
    await trainers.end(again)
    sheet = next(sheet for sheet in await port.balance() if sheet.kind == "train")
    assert sheet.closed
    assert set(sheet.verdicts) == {"trained"}
