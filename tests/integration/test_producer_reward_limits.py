"""Rewards that hang, fork, hide their children or eat memory: each ends with a reason, and no process is left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from headrace.config import EnvironmentConfig
from producers.environments.api import Rollout
from producers.rewards.scorer import Scorer
from producers.rewards.worker import Score
from tests.living import living
from tests.support import wait_until

MEMORY_MB = 300

OWN = """
import os, subprocess, sys, time
from producers.environments.single_turn import SingleTurn

MIB = 1 << 20
held = []

class Own:
    def __len__(self): return 1
    def eval_size(self): return 1
    def episode(self, split, index, seed): return SingleTurn("?", 1)
    def correct(self, rollout): return True
    def score(self, rollout):
        return globals()[rollout.completion]()

def fine():
    return 0.75

def sleeps():
    time.sleep(600)

def tells_and_sleeps():
    open(os.path.join(os.path.dirname(__file__), "told"), "w").close()
    time.sleep(600)

def child():
    if os.fork() == 0:
        time.sleep(600)

def hidden_child():
    # What a daemon does: a session of its own, and a parent that has ended.
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(600)
        os._exit(0)
    os.wait()

def leaves_children():
    child()
    hidden_child()
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    return 0.75

def hangs_with_children():
    leaves_children()
    sleeps()

def dies_with_children():
    leaves_children()
    os._exit(7)

def is_killed():
    leaves_children()
    os.kill(os.getpid(), 9)

def kills_its_keeper():
    leaves_children()
    os.kill(os.getppid(), 9)
    sleeps()

def comes_back_twice():
    os.fork()
    return 0.75

def raises_twice():
    os.fork()
    raise ValueError("twice")

def eats():
    while True:
        held.append(bytearray(b"x" * 8 * MIB))

def eats_in_children():
    for _ in range(4):
        if os.fork() == 0:
            held.append(bytearray(b"x" * 80 * MIB))
            time.sleep(600)
    sleeps()

def shares():
    # Twice the limit if the pages of parent and children were counted one by one.
    held.append(bytearray(b"x" * 90 * MIB))
    for _ in range(4):
        if os.fork() == 0:
            time.sleep(600)
    time.sleep(0.8)
    held.clear()
    return 0.75

def who():
    return float(os.getsid(0) == os.getpid() and os.getsid(os.getppid()) == os.getppid())
"""


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> str:
    """Stands in the environment of every process that is started in this test, and in that of their children."""
    token = uuid.uuid4().hex
    monkeypatch.setenv("HEADRACE_TEST_MARK", token)
    return token


@pytest.fixture
async def scorer(tmp_path: Path, mark: str, request: pytest.FixtureRequest) -> AsyncIterator[Scorer]:
    """With a deadline that nothing here reaches, unless a test names one."""
    (tmp_path / "own.py").write_text(OWN)
    environments = {"own": EnvironmentConfig(name=f"{tmp_path}/own.py:Own")}
    scorer = Scorer(environments, workers=1, deadline_s=getattr(request, "param", 60.0), memory_mb=MEMORY_MB)
    yield scorer
    await scorer.close()
    assert marked(mark) == []


async def score(scorer: Scorer, what: str) -> Score:
    async with asyncio.timeout(60):
        return await scorer.score("own", "train", Rollout("own", 0, "", what, (), 1, "stop"))


GOOD = Score(0.75, correct=True)


@pytest.mark.parametrize("scorer", [1.5], indirect=True)
@pytest.mark.parametrize(
    ("what", "failure"),
    [
        ("sleeps", "reward took longer than 1.5 s"),
        ("hangs_with_children", "reward took longer than 1.5 s"),
        ("dies_with_children", "reward ended its worker process (exit code 7)"),
        ("is_killed", "reward ended its worker process (SIGKILL)"),
        ("kills_its_keeper", "reward took longer than 1.5 s"),
    ],
)
async def test_a_worker_is_ended_with_all_that_it_started(scorer: Scorer, mark: str, what: str, failure: str) -> None:
    assert await score(scorer, what) == Score(failure=failure)
    assert marked(mark) == []
    assert await score(scorer, "fine") == GOOD


@pytest.mark.parametrize("what", ["eats", "eats_in_children"])
async def test_memory_is_bounded_for_a_worker_and_its_children_together(scorer: Scorer, mark: str, what: str) -> None:
    failure = (await score(scorer, what)).failure
    assert failure.startswith("reward held ")
    assert failure.endswith(f"producer.reward_memory_mb allows {MEMORY_MB} for one worker and all that it starts")
    assert marked(mark) == []
    assert await score(scorer, "fine") == GOOD


async def test_pages_that_processes_share_count_once(scorer: Scorer) -> None:
    assert await score(scorer, "shares") == GOOD


async def test_children_of_a_reward_that_came_back_live_no_longer_than_its_worker(scorer: Scorer, mark: str) -> None:
    assert await score(scorer, "leaves_children") == GOOD
    assert await score(scorer, "fine") == GOOD
    # Keeper, worker, three children.
    assert len(marked(mark)) == 5
    await scorer.close()
    assert marked(mark) == []


async def test_a_child_that_comes_back_from_its_reward_is_no_second_worker(scorer: Scorer, mark: str) -> None:
    assert await score(scorer, "comes_back_twice") == GOOD
    assert (await score(scorer, "raises_twice")).failure == "reward raised ValueError: twice"
    for _ in range(3):
        assert await score(scorer, "fine") == GOOD
    await wait_until(lambda: len(marked(mark)) == 2, "only keeper and worker are left")


async def test_a_keeper_that_is_killed_takes_its_worker_with_it(scorer: Scorer, mark: str, tmp_path: Path) -> None:
    call = asyncio.ensure_future(score(scorer, "tells_and_sleeps"))
    await wait_until((tmp_path / "told").exists, "the reward sleeps")
    (keeper,) = (process for process in marked(mark) if process.ppid() == os.getpid())
    keeper.kill()
    assert await call == Score(failure="reward was ended with its worker process")
    await wait_until(lambda: marked(mark) == [], "no process is left")
    assert await score(scorer, "fine") == GOOD


async def test_keeper_and_worker_have_sessions_of_their_own(scorer: Scorer) -> None:
    """So that what a terminal sends to the producer does not reach them."""
    assert (await score(scorer, "who")).reward == 1.0


async def test_a_limit_that_no_worker_can_load_in_is_a_reason(tmp_path: Path, mark: str) -> None:
    (tmp_path / "own.py").write_text("x = bytearray(b'x' * (200 << 20))" + OWN)
    scorer = Scorer(
        {"own": EnvironmentConfig(name=f"{tmp_path}/own.py:Own")}, workers=1, deadline_s=60.0, memory_mb=100
    )
    assert "producer.reward_memory_mb allows 100" in (await score(scorer, "fine")).failure
    await scorer.close()
    assert marked(mark) == []


PARENT = """
import asyncio, sys
from headrace.config import EnvironmentConfig
from producers.environments.api import Rollout
from producers.rewards.scorer import Scorer

async def main(own):
    scorer = Scorer({"own": EnvironmentConfig(name=own)}, workers=2, deadline_s=600)
    rollouts = [Rollout("own", 0, "", what, (), 1, "stop") for what in ("fine", "leaves_children")]
    print(await asyncio.gather(*(scorer.score("own", "train", rollout) for rollout in rollouts)), flush=True)
    await scorer.score("own", "train", Rollout("own", 0, "", "hangs_with_children", (), 1, "stop"))

asyncio.run(main(sys.argv[1]))
"""


async def test_a_killed_producer_leaves_no_process(tmp_path: Path, mark: str) -> None:
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "parent.py").write_text(PARENT)
    parent = await asyncio.create_subprocess_exec(
        *(sys.executable, str(tmp_path / "parent.py"), f"{tmp_path}/own.py:Own"),
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    )
    try:
        assert parent.stdout is not None
        assert (await parent.stdout.readline()).startswith(b"[Score(reward=0.75")
        # The parent, two keepers and two workers, three children of each.
        await wait_until(lambda: len(marked(mark)) == 11, "all processes are there")
    finally:
        parent.send_signal(signal.SIGKILL)
        await parent.wait()
    await wait_until(lambda: marked(mark) == [], "no process is left")


def marked(mark: str) -> list[psutil.Process]:
    return living(lambda process: process.environ().get("HEADRACE_TEST_MARK") == mark)
