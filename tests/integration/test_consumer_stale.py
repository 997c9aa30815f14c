"""What becomes of tokens and groups that are too old, also when the trainer dies over it."""

from __future__ import annotations

import signal

from headrace.version import PolicyVersion
from tests.trainers import Begin, Trainers, events, lines, wait_until
from weightsync.manifest import decode


async def test_a_killed_trainer_masks_the_same_tokens_again(begin: Begin, trainers: Trainers) -> None:
    """The weights that it publishes once it has caught up are those from before, to the bit."""
    port, player, folder = await begin(
        run={"steps": 12},
        model={"wire_dtype": "float32"},
        staleness={"max_lag": 2, "stale": "mask"},
        checkpoint={"every": 100},
        evaluation={"prompts": 0},
    )
    player.behind = 3
    first = trainers.start()
    await wait_until(lambda: len(lines(folder)) >= 7, "seven steps are made, which no checkpoint contains")
    player.paused = True

    async def rests() -> bool:
        step = (await port.state()).step
        head = await port.head()
        depths = await port.depths()
        nobody_plays = depths.tasks_held == depths.groups_waiting == 0
        too_few_for_a_step = depths.groups_held - 2 * step < 2
        return nobody_plays and too_few_for_a_step and head == PolicyVersion(1, step) and len(lines(folder)) == step

    await wait_until(rests, "all that came is trained on and published")
    newest = await port.head()
    assert newest is not None
    before = await port.manifest(newest)
    assert before is not None
    first.send_signal(signal.SIGKILL)
    first.wait(20)
    masked = {line["step"]: line["masked_tokens"] for line in lines(folder)}
    assert sum(masked.values()) > 0

    second = trainers.start("--resume")

    async def caught_up() -> bool:
        head = await port.head()
        return head is not None and head.incarnation == 2

    await wait_until(caught_up, "it publishes")
    after = await port.manifest(PolicyVersion(2, newest.step))
    assert after is not None, "its first version is the newest of before"
    assert decode(after).parts[0].digests == decode(before).parts[0].digests
    player.paused = False
    stderr = await trainers.end(second)
    assert second.returncode == 0, stderr
    assert [event["step"] for event in events(folder) if event["event"] == "replayed"] == sorted(masked)
    assert not [event for event in events(folder) if event["event"] == "forked"]
    assert all(line["lag"] <= 2 for line in lines(folder))
    sheet = next(sheet for sheet in await port.balance() if sheet.kind == "train")
    assert (sheet.closed, sheet.outstanding, sheet.verdicts) == (True, 0, {"trained": 24})


async def test_prompts_of_stopped_rollouts_are_asked_again(begin: Begin, trainers: Trainers) -> None:
    port, player, folder = await begin(evaluation={"prompts": 0}, staleness={"requeue": 2})
    player.stops = {"train-00000001", "train-00000003", "train-00000003.1", "train-00000003.2"}
    process = trainers.start()
    stderr = await trainers.end(process)
    assert process.returncode == 0, stderr
    asked = {delivery.task.task_id: delivery.task for delivery in player.answered}
    assert {"train-00000001.1", "train-00000003.1", "train-00000003.2"} < set(asked)
    assert not {"train-00000001.2", "train-00000003.3"} & set(asked)
    assert asked["train-00000001.1"].index == asked["train-00000001"].index
    assert asked["train-00000001.1"].seed == asked["train-00000001"].seed
    sheet = next(sheet for sheet in await port.balance() if sheet.kind == "train")
    assert (sheet.closed, sheet.outstanding, sheet.verdicts) == (True, 0, {"trained": 12, "stale": 4})
    dropped = [line["kept_and_dropped"] for line in lines(folder)]
    assert sum(line["groups"].get("stale", 0) for line in dropped) == 4
    assert sum(line["tokens"].get("stale", {}).get("64", 0) for line in dropped) == 4, "they had 40 tokens by then"
    assert sum(sum(line["rewards"]["trained"].values()) for line in dropped) == 36
