"""`headrace dead` on a real Redis, with letters as a producer and a trainer write them."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgpack
import numpy as np
import pytest
import redis

from broker.api import Fence, Hello, RunRecord
from broker.connect import Run, connect_run, connect_runs
from broker.messages import SCHEMA, Group, Task
from deploy.redis_server import RedisServer
from headrace.config import Config
from tests.support import make_group, make_task, make_trajectory

DIGESTS = {"model": "m", "tokenizer": "t", "chat_template": "c"}
HUGE = 300_000
"""Tokens of a body that `dead` does not keep whole."""


class Desk:
    """One run on a Redis of its own, and the command line."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder = url, folder

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "deploy.cli", "dead", *arguments],
            cwd=self.folder,
            env={
                "PYTHONPATH": str(Path.cwd()),
                "PATH": "/usr/bin:/bin",
                "HOME": str(self.folder),
                "COLUMNS": "200",
                "HEADRACE_REDIS_URL": self.url,
            },
            capture_output=True,
            text=True,
            timeout=60,
        )

    def said(self, *arguments: str) -> str:
        done = self(*arguments)
        assert (done.stderr, done.returncode) == ("", 0)
        return done.stdout

    def letters(self) -> dict[str, str]:
        """Task to id."""
        return {row["task"]: row["id"] for row in json.loads(self.said("list", "--json"))}

    def balance(self) -> tuple[int, int, dict[str, int]]:
        async def ask() -> tuple[int, int, dict[str, int]]:
            run = connect_run(self.url, "r")
            (sheet,) = [sheet for sheet in await run.balance() if sheet.kind == "train"]
            await run.close()
            return sheet.admitted, sheet.outstanding, {name: n for name, n in sheet.verdicts.items() if n}

        return asyncio.run(ask())


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    server = RedisServer(tmp_path / "redis", tmp_path / "redis.log")
    server.start()
    asyncio.run(fill(server.url))
    yield Desk(server.url, tmp_path)
    server.stop()


async def fill(url: str) -> None:
    """Three dead letters: a group with a log-prob that is no number, one too long to be kept, and no task at all."""
    runs, run = connect_runs(url), connect_run(url, "r")
    await runs.create(RunRecord("r", SCHEMA, Config().model_dump(mode="json"), DIGESTS, vocab_size=100))
    fence = await run.take_fence(0)
    await run.join(Hello("p", SCHEMA, DIGESTS, "host", os.getpid()))
    await die(run, fence, make_task("nan"), 6)
    await die(run, fence, make_task("huge"), HUGE)
    await run.admit(fence, [make_task("broken")])
    break_task(url)
    assert await run.take("p", 1, 0) == []
    assert len(await run.take_groups(fence, 8, 5000)) == 1
    await run.close()
    await runs.close()


async def die(run: Run, fence: Fence, task: Task, sampled: int) -> None:
    """Publish a group that is refused for a log-prob that is no number."""
    await run.admit(fence, [task])
    (delivery,) = await run.take("p", 1, 1000)
    assert await run.publish("p", delivery, broken_group(task, delivery.attempt, sampled)) == "published"
    (group,) = await run.take_groups(fence, 8, 5000)
    assert group.group.outcome == "dead"


def broken_group(task: Task, attempt: int, sampled: int) -> Group:
    long = make_trajectory(np.random.default_rng(0), sampled=sampled)
    long.logprobs_T[5] = np.nan
    return replace(make_group(task, attempt, "p"), trajectories=(long, long))


def break_task(url: str) -> None:
    """Replace the waiting task's entry by one that no release could have written."""
    with redis.Redis.from_url(url) as client:
        client.xtrim("{hr:r}:tasks", 0)
        fields = {"task": "broken", "attempt": "0", "kind": "train", "body": b"\x00\x1b[31mno task\xff"}
        client.hset("{hr:r}:open", "broken", b"train t " + client.xadd("{hr:r}:tasks", fields))


def test_they_are_listed_with_their_reasons(desk: Desk) -> None:
    rows = [line.split(maxsplit=7) for line in desk.said("list").splitlines()[1:]]
    assert [(row[3], row[4], row[5]) for row in rows] == [
        ("groups", "nan", "1"),
        ("groups", "huge", "1"),
        ("tasks", "broken", "1"),
    ]
    assert "a log-prob of trajectory 0 is not finite" in rows[0][7]
    listed = json.loads(desk.said("list", "--json"))
    columns = desk.said("list").splitlines()[0].split()
    assert {*columns} - {"age"} <= {*listed[0]} == {*columns, "age_s", "kind", "sha256"} - {"age"}, "one set of names"
    assert [row["bytes"] for row in listed][2] == 14
    assert all(row["age_s"] >= 0 and len(row["sha256"]) == 64 and row["kind"] == "train" for row in listed)


def test_one_is_shown_as_far_as_it_can_be_read(desk: Desk) -> None:
    letters = desk.letters()
    nan = desk.said("show", letters["nan"])
    assert re.search(r"^reason +a log-prob of trajectory 0 is not finite", nan, re.M)
    assert re.search(r"^  env +arithmetic$", nan, re.M)
    assert re.search(r"^  2 trajectories of 10, 10 tokens$", nan, re.M)
    assert re.search(r"^  log-prob number 1 \(token 5 of trajectory 0\) is nan$", nan, re.M)
    assert re.search(rf"^id +{letters['nan']}$", nan, re.M)
    broken = desk.said("show", letters["broken"])
    assert "00 1b 5b 33 31 6d 6e 6f 20 74 61 73 6b ff" in broken
    assert "|..[31mno task.|" in broken
    assert "\x1b" not in broken
    huge = desk.said("show", letters["huge"])
    assert re.search(r"^bytes +[\d,]+, of which the first 1,048,576 are kept$", huge, re.M)
    assert re.search(r"^  env +arithmetic$", huge, re.M), "what was kept is read as far as it goes"
    assert "… no more can be read (OutOfData)" in huge


def test_the_bytes_can_be_kept(desk: Desk) -> None:
    letters = {row["task"]: row for row in json.loads(desk.said("list", "--json"))}
    file = desk.folder / "body"
    assert f"bytes to {file}" in desk.said("show", letters["nan"]["id"], "--output", str(file))
    assert hashlib.sha256(file.read_bytes()).hexdigest() == letters["nan"]["sha256"]
    assert msgpack.unpackb(file.read_bytes())[1]["task"] == "nan"
    assert "the rest was not kept" in desk.said("show", letters["huge"]["id"], "--output", str(file))
    assert file.stat().st_size == 1 << 20
    refused = desk("show", letters["nan"]["id"], "--output", str(desk.folder))
    assert (refused.stderr, refused.returncode) == (f"headrace: {desk.folder} cannot be written: Is a directory\n", 7)


def test_a_replayed_one_waits_again_and_counts_as_admitted_anew(desk: Desk) -> None:
    letters = desk.letters()
    assert desk.balance() == (3, 0, {"dead": 3})
    said = desk.said("replay", letters["nan"], letters["broken"])
    back = "it is back where it came from, and its task is admitted anew"
    assert said.splitlines() == [f"{letters[task]}: {back}" for task in ("nan", "broken")]
    assert desk.balance() == (5, 2, {"dead": 3})
    assert list(desk.letters()) == ["huge"]


def test_what_cannot_be_replayed_says_why_and_the_rest_is(desk: Desk) -> None:
    letters = desk.letters()
    done = desk("replay", "--all")
    assert len(done.stdout.splitlines()) == 2
    assert done.stderr.splitlines()[0].startswith(f"{letters['huge']}: the dead letter '{letters['huge']}' was longer")
    assert done.stderr.splitlines()[1] == (
        "headrace: 1 of 3 letters of run r could not be replayed; the reasons stand above"
    )
    assert done.returncode == 3
    gone = desk("replay", letters["nan"])
    assert "is not there; `headrace dead list` shows those that are" in gone.stderr
    assert gone.returncode == 3


def test_dropped_ones_are_forgotten_and_stay_counted(desk: Desk) -> None:
    letters = desk.letters()
    assert desk.said("drop", letters["nan"], "1-1") == "dropped 1 of run r; the rest was not there\n"
    assert desk.said("drop", "--all") == "dropped 2 of run r\n"
    assert desk.said("list") == "no dead letters\n"
    assert desk.said("replay", "--all") == "run r has no dead letters\n"
    assert desk.said("drop", "--all") == "dropped 0 of run r\n"
    assert desk.balance() == (3, 0, {"dead": 3})
    missing = desk("drop", letters["nan"])
    assert "run r has no such dead letter" in missing.stderr
    assert missing.returncode == 3
    shown = desk("show", letters["nan"])
    assert f"the dead letter '{letters['nan']}' is not there" in shown.stderr
    assert shown.returncode == 3
