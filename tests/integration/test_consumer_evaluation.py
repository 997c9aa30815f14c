"""A real trainer that evaluates beside training: nothing stops for it, and no death makes it count twice."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from headrace.version import PolicyVersion
from tests.servers import RedisProcess
from tests.trainers import Begin, Player, Trainers, events, lines, wait_until
from weightsync.arena import Arena
from weightsync.manifest import decode

PROMPTS, SAMPLES = 3, 4
EVALUATION = {"every": 2}


@pytest.fixture
def redis_server(redis_process: Callable[..., RedisProcess]) -> RedisProcess:
    """One of the test's own, that it may empty."""
    return redis_process()


def results(folder: Path) -> list[dict[str, Any]]:
    written = [json.loads(line) for line in (folder / "evaluations.jsonl").read_text().splitlines()]
    return [line for line in written if line["event"] == "result"]


async def withheld(player: Player) -> None:
    """Evaluation tasks are with the player, which answers training only."""
    await wait_until(lambda: len(player.withheld or ()) >= PROMPTS, "all prompts are asked")


def whole(folder: Path, **verdicts: int) -> dict[str, Any]:
    """The summary of a run whose sheets are closed."""
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    sheet = summary["balance"]["eval"]
    assert (sheet["closed"], sheet["outstanding"], sheet["verdicts"]) == (True, 0, verdicts)
    assert (summary["balance"]["train"]["closed"], summary["balance"]["train"]["outstanding"]) == (True, 0)
    assert [result["samples"] for result in summary["evaluations"]] == [PROMPTS * SAMPLES] * len(summary["evaluations"])
    assert len(results(folder)) == len(summary["evaluations"])
    return summary


async def test_versions_are_evaluated_while_steps_go_on(begin: Begin, trainers: Trainers) -> None:
    port, player, folder = await begin(run={"steps": 7}, evaluation=EVALUATION)
    player.withheld = []
    process = trainers.start()
    await withheld(player)
    await wait_until(lambda: len(lines(folder)) == 7, "all steps are made")
    assert await port.pinned() == {PolicyVersion(1, 0)}
    assert await port.manifest(PolicyVersion(1, 0)) is not None, "it is kept, however many came after it"
    skipped = [event["version"] for event in events(folder) if event["event"] == "evaluation_skipped"]
    assert skipped == ["1.2", "1.4", "1.6"]
    await player.release()
    stderr = await trainers.end(process)
    assert process.returncode == 0, stderr
    summary = whole(folder, evaluated=2 * PROMPTS)
    assert [(result["when"], result["version"]) for result in summary["evaluations"]] == [
        ("before", "1.0"),
        ("after", "1.7"),
    ]
    assert summary["accuracy_before"] == summary["accuracy_after"], "this producer always answers the same"
    assert await port.pinned() == set()


async def test_every_so_many_steps_there_is_a_result_of_exactly_that_version(begin: Begin, trainers: Trainers) -> None:
    port, player, folder = await begin(run={"steps": 6}, evaluation=EVALUATION, staleness={"max_lag": 0})
    process = trainers.start()
    stderr = await trainers.end(process)
    assert process.returncode == 0, stderr
    summary = whole(folder, evaluated=4 * PROMPTS)
    assert [(result["when"], result["version"]) for result in summary["evaluations"]] == [
        ("before", "1.0"),
        ("step", "1.2"),
        ("step", "1.4"),
        ("after", "1.6"),
    ]
    asked = [delivery.task for delivery in player.answered if delivery.task.kind == "eval"]
    assert {task.min_version.step for task in asked} == {0, 2, 4, 6}
    assert len({(task.index, task.seed) for task in asked}) == PROMPTS, "each asks the same"
    assert (await port.state()).status == "finished"


async def test_a_trainer_killed_in_an_evaluation_goes_on_with_it(begin: Begin, trainers: Trainers) -> None:
    port, player, folder = await begin(run={"steps": 6}, evaluation=EVALUATION)
    player.withheld = []
    first = trainers.start()
    await withheld(player)
    one = player.withheld.pop()
    await port.publish("player", one, player.group(one, one.task.min_version))
    journal = folder / "evaluations.jsonl"
    await wait_until(lambda: '"answer"' in journal.read_text(), "one prompt has answered")
    await wait_until(lambda: len(lines(folder)) >= 3, "steps are made beside it")
    first.send_signal(signal.SIGKILL)
    first.wait(20)
    second = trainers.start("--resume")
    await wait_until(lambda: len(lines(folder)) >= 5, "the next trainer makes steps")
    await player.release()
    stderr = await trainers.end(second)
    assert second.returncode == 0, stderr
    summary = whole(folder, evaluated=PROMPTS * len(results(folder)))
    first_result = summary["evaluations"][0]
    assert (first_result["when"], first_result["version"]) == ("before", "1.0")
    assert summary["evaluations"][-1]["version"] == "2.6"
    asked = [delivery.task.task_id for delivery in player.answered if delivery.task.kind == "eval"]
    assert len(asked) == len(set(asked)), "nothing was asked twice"
    assert await port.pinned() == set()


async def test_a_redis_that_is_emptied_in_an_evaluation_loses_nothing_of_it(
    begin: Begin, trainers: Trainers, redis_server: RedisProcess
) -> None:
    port, player, folder = await begin(run={"steps": 8}, evaluation={"every": 0}, checkpoint={"every": 1000})
    player.may_be_superseded = True
    player.withheld = []
    process = trainers.start()
    await withheld(player)
    one = player.withheld.pop()
    await port.publish("player", one, player.group(one, one.task.min_version))
    journal = folder / "evaluations.jsonl"
    await wait_until(lambda: '"answer"' in journal.read_text(), "one prompt has answered")
    await wait_until(lambda: len(lines(folder)) >= 2, "steps are made beside it")
    player.withheld = []
    segment = decode(await port.manifest(PolicyVersion(1, 0)) or b"").parts[0].segment
    with redis.Redis.from_url(redis_server.url) as client:
        client.flushall()
    await wait_until(lambda: len(player.withheld or ()) == PROMPTS - 1, "what has not answered is asked anew")

    async def told_again() -> bool:
        found = await port.manifest(PolicyVersion(1, 0))
        return found is not None and await port.pinned() == {PolicyVersion(1, 0)}

    await wait_until(told_again, "Redis hears of the version again")
    assert Arena().has(segment), "it is still there"
    await player.release()
    stderr = await trainers.end(process)
    assert process.returncode == 0, stderr
    whole(folder, evaluated=2 * PROMPTS, lost=PROMPTS - 1)


async def test_rollouts_that_are_not_of_their_version_alone_are_refused_and_asked_again(
    begin: Begin, trainers: Trainers
) -> None:
    _port, player, folder = await begin(run={"steps": 4}, evaluation={"every": 0})
    player.mixes = 2
    process = trainers.start()
    stderr = await trainers.end(process)
    assert process.returncode == 0, stderr
    summary = whole(folder, evaluated=2 * PROMPTS, filtered=2)
    reasons = summary["balance"]["eval"]["reasons"]
    assert reasons == {"filtered: it has keys and values of another version": 2}
