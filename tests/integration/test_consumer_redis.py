"""A trainer whose Redis dies, forgets its newest writes, or everything, goes on, and its sheet closes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest
import redis

from broker.connect import connect_runs
from tests.servers import RedisProcess
from tests.trainers import BROKER, Begin, Trainers, events, lines, wait_until

pytestmark = pytest.mark.timeout(240)
STEPS = 12


@pytest.fixture
def redis_server(redis_process: Callable[..., RedisProcess]) -> RedisProcess:
    """One of the test's own, whose append-only file only grows."""
    return redis_process("--auto-aof-rewrite-percentage", "0")


@pytest.mark.parametrize("harm", ["restarted", "without its newest writes", "emptied"])
async def test_a_trainer_goes_on_when_its_redis_was(
    harm: str, begin: Begin, trainers: Trainers, redis_server: RedisProcess
) -> None:
    port, player, folder = await begin(run={"steps": STEPS}, checkpoint={"every": 1000}, evaluation={"prompts": 0})
    player.may_be_superseded = True
    process = trainers.start()
    await wait_until(lambda: len(lines(folder)) >= 2, "two steps are made")
    size = redis_server.append_only_file.stat().st_size
    await wait_until(lambda: len(lines(folder)) >= 5, "three more are made")
    if harm == "emptied":
        with redis.Redis.from_url(redis_server.url) as client:
            client.flushall()
    else:
        redis_server.kill()
        if harm == "without its newest writes":
            with redis_server.append_only_file.open("r+b") as file:
                file.truncate(size)
        await asyncio.to_thread(redis_server.start)
    stderr = await trainers.end(process)
    assert process.returncode == 0, stderr

    assert [line["step"] for line in lines(folder)] == list(range(1, STEPS + 1))
    sheet = json.loads((folder / "summary.json").read_text())["balance"]["train"]
    assert (sheet["closed"], sheet["outstanding"]) == (True, 0), sheet
    assert set(sheet["verdicts"]) <= {"trained", "lost"}
    assert sheet["verdicts"]["trained"] == 2 * STEPS, "each group is trained on once, and none is missing"
    assert sheet["verdicts"].get("lost", 0) == lines(folder)[-1]["lost"]
    said = events(folder)
    early = [event["step"] for event in said if event["event"] == "checkpoint" and event["step"] < STEPS]
    assert len(early) == lines(folder)[-1]["mended"] == 1, "one checkpoint each time that Redis came back"
    asked = [delivery.task.task_id for delivery in player.answered]
    trained = {event["task"] for event in said if event["event"] == "second_group"}
    assert len(asked) - len(set(asked)) >= len(trained)
    head = await port.head()
    assert head is not None
    assert head.step == STEPS


async def test_what_trainer_and_redis_lose_together_is_counted_and_the_history_forks(
    begin: Begin, trainers: Trainers, redis_server: RedisProcess
) -> None:
    port, player, folder = await begin(run={"steps": STEPS}, checkpoint={"every": 1000}, evaluation={"prompts": 0})
    player.may_be_superseded = True
    first = trainers.start()
    await wait_until(lambda: len(lines(folder)) >= 2, "two steps are made")
    size = redis_server.append_only_file.stat().st_size
    await wait_until(lambda: len(lines(folder)) >= 5, "three more are made")
    first.kill()
    first.wait(20)
    redis_server.kill()
    with redis_server.append_only_file.open("r+b") as file:
        file.truncate(size)
    await asyncio.to_thread(redis_server.start)
    second = trainers.start("--resume")
    stderr = await trainers.end(second)
    assert second.returncode == 0, stderr
    made, said = lines(folder), events(folder)
    (forked,) = [event for event in said if event["event"] == "forked"]
    replayed = [event["step"] for event in said if event["event"] == "replayed"]
    old = [line["step"] for line in made if line["version"][:2] == "1."]
    assert replayed == list(range(1, forked["step"] + 1))
    assert forked["given_up"] == old[-1] - forked["step"] > 0
    assert [line["step"] for line in made if line["version"][:2] == "2."] == list(range(forked["step"] + 1, STEPS + 1))
    sheet = next(sheet for sheet in await port.balance() if sheet.kind == "train")
    assert (sheet.closed, sheet.outstanding, sheet.verdicts["trained"]) == (True, 0, 2 * STEPS)
    assert set(sheet.verdicts) <= {"trained", "lost", "dead", "superseded"}


async def test_a_trainer_whose_run_was_put_back_into_an_emptied_redis_begins_anew_at_its_checkpoint(
    begin: Begin, trainers: Trainers, redis_server: RedisProcess
) -> None:
    """Redis knows of no incarnation before it and no checkpoint is of one: still its versions are no earlier one's."""
    port, player, folder = await begin(run={"steps": STEPS}, checkpoint={"every": 1000}, evaluation={"prompts": 0})
    player.may_be_superseded = True
    record = await port.record()
    first = trainers.start()
    await wait_until(lambda: len(lines(folder)) >= 3, "three steps are made")
    first.kill()
    first.wait(20)
    with redis.Redis.from_url(redis_server.url) as client:
        client.flushall()
    runs = connect_runs(redis_server.url, BROKER)
    await runs.create(record)
    await runs.close()
    second = trainers.start("--resume")
    stderr = await trainers.end(second)
    assert second.returncode == 0, stderr
    made = [line["version"] for line in lines(folder)]
    again = made.index("2.1")
    assert [version.split(".") for version in made[again:]] == [["2", str(step)] for step in range(1, STEPS + 1)]
    assert {version[:2] for version in made[:again]} == {"1."}
    (forked,) = [event for event in events(folder) if event["event"] == "forked"]
    assert (forked["step"], forked["given_up"]) == (0, again)
    sheet = next(sheet for sheet in await port.balance() if sheet.kind == "train")
    assert (sheet.closed, sheet.outstanding, sheet.verdicts) == (True, 0, {"trained": 2 * STEPS})


async def test_a_trainer_that_waits_puts_an_emptied_redis_right(
    begin: Begin, trainers: Trainers, redis_server: RedisProcess
) -> None:
    """Its newest version is announced anew, so that producers go on, and it takes a checkpoint."""
    port, player, folder = await begin(run={"steps": STEPS}, checkpoint={"every": 1000}, evaluation={"prompts": 0})
    player.may_be_superseded = True
    process = trainers.start()
    await wait_until(lambda: len(lines(folder)) >= 2, "two steps are made")
    player.paused = True

    async def rests() -> bool:
        depths = await port.depths()
        played = depths.tasks_held == depths.groups_waiting == 0
        return played and depths.groups_held - 2 * len(lines(folder)) < 2

    await wait_until(rests, "nothing is left to train on")
    head = await port.head()
    with redis.Redis.from_url(redis_server.url) as client:
        client.flushall()
    await wait_until(lambda: "announced_again" in [event["event"] for event in events(folder)], "it is announced")
    await wait_until(lambda: "checkpoint" in [event["event"] for event in events(folder)], "it takes a checkpoint")
    assert await port.head() == head
    assert head is not None
    assert await port.manifest(head) is not None
    player.paused = False
    stderr = await trainers.end(process)
    assert process.returncode == 0, stderr
    sheet = next(sheet for sheet in await port.balance() if sheet.kind == "train")
    assert (sheet.closed, sheet.outstanding, sheet.verdicts["trained"]) == (True, 0, 2 * STEPS)


async def test_a_trainer_that_is_to_leave_does_not_wait_for_a_redis_that_is_gone(
    begin: Begin, trainers: Trainers, redis_server: RedisProcess
) -> None:
    _port, player, folder = await begin(
        run={"steps": 1000}, checkpoint={"every": 1000}, evaluation={"prompts": 0}, broker={"connect_timeout_s": 1.0}
    )
    process = trainers.start()
    await wait_until(lambda: len(lines(folder)) >= 1, "a step is made")
    player.paused = True
    redis_server.kill()
    process.terminate()
    stderr = await trainers.end(process)
    assert process.returncode == 3, stderr
    assert "cannot be reached" in stderr
    assert "Traceback" not in stderr
    await asyncio.to_thread(redis_server.start)
