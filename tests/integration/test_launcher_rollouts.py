"""`headrace rollouts` on a real Redis, fed through the broker as a producer feeds it."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from broker.api import Hello, RunRecord
from broker.connect import connect_run, connect_runs
from broker.messages import SCHEMA, Group, Task, Trajectory, VersionSpan
from deploy.redis_server import RedisServer
from deploy.run_folder import RunFolder
from headrace.config import Config
from headrace.files import write_json
from headrace.version import PolicyVersion
from tests.living import living

WORDS = {"what": 0, "is": 1, "two": 2, "four": 3}
DIGESTS = {"model": "m", "tokenizer": "t", "chat_template": "c"}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    made = RedisServer(tmp_path / "redis", tmp_path / "redis.log")
    made.start()
    yield made
    made.stop()


def record(folder: Path) -> RunRecord:
    """Of a run whose model folder holds a tokenizer of four words."""
    vocabulary = {"type": "WordLevel", "vocab": WORDS, "unk_token": "what"}
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": vocabulary}))
    (folder / "facts.json").write_text(json.dumps({"folder": str(folder)}))
    config = Config().model_dump(mode="json")
    return RunRecord("r", SCHEMA, config, DIGESTS, vocab_size=4, folder=str(folder))


def trajectory(answer: int, reward: float) -> Trajectory:
    return Trajectory(
        token_ids_T=np.array([0, 1, 2, answer], np.int32),
        logprobs_T=np.array([0, 0, 0, -1], np.float32),
        loss_mask_T=np.array([False, False, False, True]),
        spans=(VersionSpan(3, 4, PolicyVersion(1, 2)),),
        reward=reward,
        finish_reason="stop",
    )


async def feed(url: str, folder: Path) -> None:
    """A run at step 5 with one group of two rollouts, sampled at step 2, and one member that failed."""
    runs, run = connect_runs(url), connect_run(url, "r")
    await runs.create(record(folder))
    fence = await run.take_fence(0)
    version = PolicyVersion(fence.incarnation, 0)
    task = Task("t", "train", "arithmetic", 7, 0, 3, version, await run.now_ms() + 60_000)
    await run.admit(fence, [task])
    await run.join(Hello("p", SCHEMA, DIGESTS, "host", os.getpid()))
    (delivery,) = await run.take("p", 1, 1000)
    rollouts = (trajectory(3, 1.0), trajectory(2, 0.0))
    group = Group("t", delivery.attempt, "train", "arithmetic", 7, "p", rollouts, ("reward took too long",))
    assert await run.publish("p", delivery, group) == "published"
    await run.set_step(fence, 5)
    await run.close()
    await runs.close()


def headrace(url: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "deploy.cli", *arguments],
        cwd=folder,
        env={"PYTHONPATH": str(Path.cwd()), "PATH": "/usr/bin:/bin", "HOME": str(folder), "HEADRACE_REDIS_URL": url},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_rollouts_are_shown_as_text_with_reward_and_lag(server: RedisServer, tmp_path: Path) -> None:
    asyncio.run(feed(server.url, tmp_path))
    done = headrace(server.url, tmp_path, "rollouts")
    assert (done.stderr, done.returncode) == ("", 0)
    assert done.stdout.splitlines() == [
        "arithmetic/7  reward 1.00  lag 3  stop  p",
        "  prompt      what is two",
        "  completion  four",
        "arithmetic/7  reward 0.00  lag 3  stop  p",
        "  prompt      what is two",
        "  completion  two",
        "arithmetic/7  failed  p",
        "  failed      reward took too long",
    ]
    newest = headrace(server.url, tmp_path, "rollouts", "-n", "1")
    assert newest.stdout.splitlines() == ["arithmetic/7  failed  p", "  failed      reward took too long"]


def test_following_shows_what_comes(server: RedisServer, tmp_path: Path) -> None:
    asyncio.run(feed(server.url, tmp_path))
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "deploy.cli", "rollouts", "--follow"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(Path.cwd()), "PATH": "/usr/bin:/bin", "HEADRACE_REDIS_URL": server.url},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for _ in range(8):
        assert process.stdout.readline()

    async def end() -> None:
        run = connect_run(server.url, "r")
        await run.set_status("finished", "")
        await run.close()

    asyncio.run(end())
    assert process.communicate(timeout=60)[0] == ""
    assert process.returncode == 0


def test_a_run_that_has_ended_is_read_from_what_its_redis_left(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "runs" / "r")
    folder.make()
    server = RedisServer(folder.redis_folder, folder.log("redis"))
    server.start()
    asyncio.run(feed(server.url, folder.path))
    write_json(folder.config_file, Config().model_dump(mode="json"))
    server.kill()
    for arguments in ((), ("--run", "r"), ("--follow",)):
        done = headrace("", tmp_path, "rollouts", *arguments)
        assert (done.stderr, done.returncode) == ("", 0)
        assert done.stdout.splitlines()[:3] == [
            "arithmetic/7  reward 1.00  lag 3  stop  p",
            "  prompt      what is two",
            "  completion  four",
        ]
    assert headrace("", tmp_path, "dead", "list").stdout == "no dead letters\n"
    assert not folder.live
    assert not living(lambda process: str(tmp_path) in " ".join(process.cmdline()))

    shutil.rmtree(folder.redis_folder)
    elsewhere = headrace("", tmp_path, "rollouts")
    assert elsewhere.returncode == 2
    assert elsewhere.stderr == (
        "headrace: run r had no Redis of its own; set HEADRACE_REDIS_URL to the one that it was in\n"
    )
    folder.redis_folder.mkdir()
    emptied = headrace("", tmp_path, "rollouts")
    assert emptied.returncode == 2
    assert emptied.stderr.startswith("headrace: run r has ended, and its rollouts are gone")


def test_services_without_a_launcher_can_be_stopped_but_not_scaled(server: RedisServer, tmp_path: Path) -> None:
    asyncio.run(feed(server.url, tmp_path))
    scaled = headrace(server.url, tmp_path, "scale", "producer", "2")
    assert "run r has no launcher" in scaled.stderr
    assert scaled.returncode == 7
    unknown = headrace(server.url, tmp_path, "status", "--run", "other")
    assert "other" in unknown.stderr
    assert unknown.returncode == 3
