"""A producer of another make, written from docs/wire-protocol.md alone, against a real trainer's port on real Redis."""

from __future__ import annotations

import ast
import asyncio
import hashlib
import json
import re
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import redis

from broker.api import Fence, Order, RunRecord
from broker.codec import decode_group, decode_task, encode_group, encode_task
from broker.connect import Run
from broker.messages import SCHEMA, Group, GroupDelivery, StepEntry, Task, Trajectory, VersionSpan
from broker.validate import Limits
from deploy.scripts import write_scripts
from headrace.version import PolicyVersion
from tests.foreign import PLAYER, foreign
from tests.servers import RedisProcess
from tests.support import make_task, wait_until

DOCUMENT = (Path(__file__).parents[2] / "docs" / "wire-protocol.md").read_text()

EXAMPLE_TASK = Task("train-17", "train", "arithmetic", 17, 4242, 2, PolicyVersion(1, 0), 1_767_225_600_000, 3)


def member(completion: list[int], logprobs: list[float], reward: float, *, correct: bool) -> Trajectory:
    """After the prompt 5 6."""
    tokens = 2 + len(completion)
    return Trajectory(
        token_ids_T=np.array([5, 6, *completion], np.int32),
        logprobs_T=np.array([0, 0, *logprobs], np.float32),
        loss_mask_T=np.arange(tokens) >= 2,
        spans=(VersionSpan(2, tokens, PolicyVersion(1, 0)),),
        reward=reward,
        finish_reason="stop",
        correct=correct,
    )


EXAMPLE_GROUP = Group(
    task_id="train-17",
    attempt=1,
    kind="train",
    environment="arithmetic",
    index=17,
    producer="foreign",
    trajectories=(
        member([7, 8, 9], [-0.5, -0.25, -1.0], 1.0, correct=True),
        member([7], [-0.5], 0.5, correct=False),
    ),
)


Make = Callable[..., Any]


@pytest.fixture(scope="session")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wire") / "scripts"
    assert write_scripts(folder).startswith("wrote ")
    return folder


@pytest.fixture
async def fence(run: Run) -> Fence:
    """The trainer is there, and has published the weights of step 0."""
    fence = await run.take_fence(0)
    await run.publish_head(fence, PolicyVersion(fence.incarnation, 0), b"a manifest")
    return fence


@pytest.fixture
async def make(redis_url: str, record: RunRecord, scripts: Path) -> AsyncIterator[Make]:
    """Foreign producers, joined."""
    made: list[Any] = []

    def join(name: str = "foreign", play: Any = None) -> Any:
        made.append(foreign.Producer(redis_url, record.run_id, name, scripts, play))
        made[-1].join(record.digests)
        made[-1].look_at_head()
        return made[-1]

    yield join
    for producer in made:
        producer.redis.close()


@pytest.fixture
def admin(redis_server: RedisProcess) -> Iterator[redis.Redis]:
    """Who may do to Redis what no producer may."""
    with redis.Redis.from_url(redis_server.admin_url) as client:
        yield client


async def only(run: Run, fence: Fence) -> GroupDelivery:
    (delivery,) = await run.take_groups(fence, 8, 5000)
    return delivery


async def trained(run: Run, fence: Fence, deliveries: list[GroupDelivery]) -> None:
    for each in deliveries:
        entry = StepEntry(each.entry_id, each.group.task_id, "failed" if each.group.error else "trained")
        await run.settle(fence, [entry])


def documented(name: str) -> bytes:
    """The bytes under a mark of the document."""
    found = re.search(rf"<!-- bytes: {name} -->\n```\n(.*?)\n```", DOCUMENT, re.S)
    assert found, f"docs/wire-protocol.md shows no bytes of a {name}"
    return bytes.fromhex(found[1])


def cells(heading: str) -> list[list[str]]:
    """The rows of the first table under a heading of the document, without their backticks."""
    part = DOCUMENT.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    table = re.search(r"(?:^\|.*\n)+", part, re.M)
    assert table
    rows = [[cell.strip().replace("`", "") for cell in row.strip("|").split("|")] for row in table[0].splitlines()]
    return rows[2:]


def test_the_documents_task_is_what_the_codec_makes() -> None:
    assert encode_task(EXAMPLE_TASK).hex(" ") == documented("task").hex(" ")
    assert decode_task(documented("task")) == EXAMPLE_TASK
    assert f"The task's body, {len(documented('task'))} bytes" in DOCUMENT


def test_the_documents_group_says_what_the_codec_makes() -> None:
    """Not byte for byte: msgpack has several forms of one thing, and the codec takes those that cost least."""
    body = documented("group")
    assert msgpack.unpackb(encode_group(EXAMPLE_GROUP, 100)) == msgpack.unpackb(body)
    group = decode_group(body, Limits(100, {"train": 2}))
    assert [each.token_ids_T.tolist() for each in group.trajectories] == [[5, 6, 7, 8, 9], [5, 6, 7]]
    assert f"The group's body, {len(body)} bytes" in DOCUMENT


def test_the_player_makes_the_documents_group_from_the_documents_task() -> None:
    schema, task = msgpack.unpackb(documented("task"))
    assert schema == SCHEMA
    assert played(task).hex(" ") == documented("group").hex(" ")


def played(task: dict[str, Any]) -> bytes:
    rollouts = [
        {"completion": [7, 8, 9], "logprobs": [-0.5, -0.25, -1.0], "reward": 1.0, "correct": True},
        {"completion": [7], "logprobs": [-0.5], "reward": 0.5, "correct": False},
    ]
    rollouts = [{"prompt": [5, 6], "finish": "stop", **rollout} for rollout in rollouts]
    return bytes(foreign.group_body({**task, "attempt": 1}, "foreign", rollouts, [1, 0], 100, ""))


def test_the_documents_scripts_and_keys_are_those_that_there_are(scripts: Path) -> None:
    found = json.loads((scripts / "scripts.json").read_text())["scripts"]
    for name, keys, *_ in cells("Scripts"):
        assert (name, keys.split()) == (name, found[name]["keys"])
        assert found[name]["fenced"] is False
        text = (scripts / found[name]["file"]).read_bytes()
        assert found[name]["sha1"] == hashlib.sha1(text).hexdigest()
    nouns = {noun.strip() for row in cells("Keys") for noun in row[0].split(",")}
    used = {noun for script in found.values() for noun in script["keys"]}
    assert used | {"beat:NAME"} == nouns
    assert f"schema {SCHEMA}**" in DOCUMENT


def test_the_player_needs_nothing_of_headrace() -> None:
    roots = set()
    for node in ast.walk(ast.parse(PLAYER.read_text())):
        if isinstance(node, ast.Import):
            roots |= {name.name.split(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            roots.add(str(node.module).split(".")[0])
    assert roots - set(sys.stdlib_module_names) == {"redis", "msgpack"}


async def test_it_plays_a_run_from_joining_to_the_end_order(run: Run, fence: Fence, make: Make) -> None:
    await run.admit(fence, [make_task(f"t{n}", group_size=3) for n in range(5)])
    producer = make()
    playing = asyncio.create_task(asyncio.to_thread(producer.run))
    groups: list[GroupDelivery] = []
    while len(groups) < 5:
        groups += await run.take_groups(fence, 8, 2000)
    assert sorted(each.group.task_id for each in groups) == [f"t{n}" for n in range(5)]
    for each in groups:
        group = each.group
        assert (group.outcome, group.producer, len(group.trajectories), group.attempt) == ("played", "foreign", 3, 1)
        for member in group.trajectories:
            assert member.loss_mask_T.tolist() == [False] * 4 + [True] * 8
            assert np.allclose(member.logprobs_T[4:], -np.log(100))
            (span,) = member.spans
            assert (span.start, span.end, span.version, span.kv) == (4, 12, PolicyVersion(1, 0), "fresh")
    await trained(run, fence, groups)

    async def seen() -> bool:
        peers = {peer.name: peer for peer in await run.peers()}
        return "foreign" in peers and peers["foreign"].state["version"] == "1.0"

    await wait_until(seen, "its heartbeat is seen")
    await run.finish(fence, "finished", "all steps made")
    await asyncio.wait_for(playing, 30)
    await asyncio.to_thread(producer.leave)
    assert await run.peers() == []
    (sheet,) = [sheet for sheet in await run.balance() if sheet.kind == "train"]
    assert (sheet.admitted, sheet.outstanding, sheet.verdicts) == (5, 0, {"trained": 5})


async def test_it_runs_as_a_program(run: Run, fence: Fence, redis_url: str, record: RunRecord, scripts: Path) -> None:
    environ = {"HEADRACE_REDIS_URL": redis_url, "HEADRACE_RUN": record.run_id}
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(PLAYER), str(scripts), env=environ, stdout=PIPE, stderr=PIPE
    )
    try:
        await run.admit(fence, [make_task("t")])
        groups: list[GroupDelivery] = []
        while not groups:
            groups = await run.take_groups(fence, 8, 2000)
        name = groups[0].group.producer
        assert name == f"foreign-{process.pid}"
        await run.order(Order("", "drain", target=name))
        assert await asyncio.wait_for(process.communicate(), 30) == (b"", b"")
        assert process.returncode == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


async def test_a_repeated_publish_is_answered_and_counts_once(run: Run, fence: Fence, make: Make) -> None:
    await run.admit(fence, [make_task("t")])
    producer = make()
    (entry,) = producer.take(1)
    task = producer.held[entry]
    assert producer.finish(entry) == "published"
    producer.held[entry] = task
    assert producer.finish(entry) == "repeated"
    assert (await only(run, fence)).group.task_id == "t"
    assert await run.take_groups(fence, 8, 0) == []


async def test_what_was_taken_over_is_superseded(run: Run, fence: Fence, make: Make, admin: redis.Redis) -> None:
    await run.admit(fence, [make_task("t")])
    silent, other = make("silent"), make("other")
    (entry,) = silent.take(1)
    admin.delete(silent.beat_key)
    await wait_until(lambda: bool(other.take(1, block_ms=0)), "the other one looks whether somebody is dead")
    (again,) = other.held
    assert (again, other.held[again]["attempt"]) == (entry, 2)
    assert silent.finish(entry) == "superseded"
    assert other.finish(entry) == "published"
    group = (await only(run, fence)).group
    assert (group.producer, group.attempt) == ("other", 2)


async def test_a_lease_that_is_renewed_is_not_taken_over(run: Run, fence: Fence, make: Make) -> None:
    await run.admit(fence, [make_task("t")])
    producer, other = make("slow"), make("other")
    (entry,) = producer.take(1)
    producer.beat()
    assert other.take(1, block_ms=0) == []
    assert list(producer.held) == [entry]
    await run.settle(fence, [StepEntry("", "t", "lost", "given up")])
    producer.beat()
    assert producer.held == {}, "a task that is nobody's any more is dropped"


async def test_tasks_that_are_given_back_go_to_others(run: Run, fence: Fence, make: Make) -> None:
    await run.admit(fence, [make_task("t")])
    producer, other = make("first"), make("second")
    producer.take(1)
    producer.leave()
    (entry,) = other.take(1)
    assert other.held[entry]["attempt"] == 2
    assert {peer.name for peer in await run.peers()} <= {"second"}


async def test_failed_rollouts_and_passed_deadlines_are_failed_groups(run: Run, fence: Fence, make: Make) -> None:
    def play(task: dict[str, Any]) -> list[dict[str, Any]]:
        raise ValueError(f"environment {task['env']} is on strike")

    producer = make("foreign", play)
    await run.admit(fence, [make_task("t")])
    (entry,) = producer.take(1)
    assert producer.finish(entry) == "published"
    group = (await only(run, fence)).group
    assert (group.outcome, group.error) == ("failed", "environment arithmetic is on strike")
    await run.admit(fence, [make_task("late", deadline_ms=1)])
    assert producer.take(1) == []
    group = (await only(run, fence)).group
    assert (group.task_id, group.outcome) == ("late", "failed")
    assert "deadline" in group.error


async def test_a_task_that_cannot_be_read_goes_to_dead(run: Run, fence: Fence, make: Make, admin: redis.Redis) -> None:
    producer = make()
    await run.admit(fence, [make_task("t")])
    tasks, open_tasks = producer.key("tasks"), producer.key("open")
    admin.xtrim(tasks, 0)
    broken = admin.xadd(tasks, {"task": "t", "attempt": "0", "kind": "train", "body": b"\x92\x09\x80", "other": "x"})
    admin.hset(open_tasks, "t", b"train t " + broken)
    assert producer.take(1) == []
    group = (await only(run, fence)).group
    assert (group.outcome, group.error) == ("dead", "task: schema 9, but this process speaks 2")
    assert (await run.depths()).dead == 1


async def test_redis_may_forget_scripts_and_groups(run: Run, fence: Fence, make: Make, admin: redis.Redis) -> None:
    producer = make()
    await run.admit(fence, [make_task("t")])
    admin.script_flush()
    admin.xgroup_destroy(producer.key("tasks"), "producers")
    (entry,) = producer.take(1)
    assert producer.finish(entry) == "published"


async def test_a_new_version_lets_a_waiting_task_start(run: Run, fence: Fence, make: Make) -> None:
    task = make_task("t")
    newer = Task(**{**{name: getattr(task, name) for name in Task.__slots__}, "min_version": PolicyVersion(1, 7)})
    await run.admit(fence, [newer])
    producer = make()
    playing = asyncio.create_task(asyncio.to_thread(producer.run))
    await wait_until(lambda: bool(producer.held), "it holds the task")
    await run.publish_head(fence, PolicyVersion(1, 7), b"a manifest")
    groups: list[GroupDelivery] = []
    while not groups:
        groups = await run.take_groups(fence, 8, 2000)
    assert groups[0].group.trajectories[0].spans[0].version == PolicyVersion(1, 7)
    await run.order(Order("", "stop"))
    await asyncio.wait_for(playing, 30)


async def test_it_refuses_itself_where_it_does_not_belong(
    run: Run, fence: Fence, make: Make, redis_url: str, record: RunRecord, scripts: Path
) -> None:
    producer = make()
    with pytest.raises(foreign.Left, match="another model"):
        producer.join({**record.digests, "model": "other"})
    await run.finish(fence, "failed", "no reason")
    with pytest.raises(foreign.Left, match="has ended"):
        producer.join(record.digests)
    stranger = foreign.Producer(redis_url, "no-such-run", "foreign", scripts)
    try:
        with pytest.raises(foreign.Left, match="no such run"):
            stranger.join()
        stranger.lease_ms = 1000
        with pytest.raises(foreign.Left, match="is gone"):
            stranger.take(1)
    finally:
        stranger.redis.close()
