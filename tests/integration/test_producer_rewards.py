"""Rewards in real worker processes: what raises, hangs or dies is a reason, and the next rollout is scored."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from headrace.config import EnvironmentConfig
from producers.environments.api import Rollout, Turn
from producers.rewards.scorer import Scorer
from producers.rewards.worker import Score
from tests.living import living

OWN = """
import asyncio, os, sys, time
from dataclasses import dataclass
from producers.environments.single_turn import SingleTurn

@dataclass(frozen=True)
class Answer:
    value: float

class Stubborn(Exception):
    def __init__(self, first, second):
        super().__init__(first)

class Untellable(Exception):
    def __str__(self): raise ValueError("not told")

class Own:
    def __len__(self): return 1
    def eval_size(self): return 1
    def episode(self, split, index, seed): return SingleTurn("?", Answer(0.75))
    async def score(self, rollout):
        what = rollout.completion
        if what == "raise": raise ValueError("bad\\nvalue " + "x" * 1000)
        if what == "stubborn": raise Stubborn("cannot", "be pickled")
        if what == "half": raise ValueError("half of a pair: \\ud800")
        if what == "untellable": raise Untellable
        if what == "timeout": raise TimeoutError("its own")
        if what == "hang": time.sleep(600)
        if what == "hang politely": await asyncio.sleep(600)
        if what == "take a while": time.sleep(0.2)
        if what == "die": os._exit(3)
        if what == "signal": os.kill(os.getpid(), 40)
        if what == "exit": sys.exit(4)
        if what == "nan": return float("nan")
        if what == "text": return "good"
        return rollout.answer.value
    def correct(self, rollout): return rollout.completion == "right"

class Async(Own):
    def score(self, rollout): return 0.5
    async def correct(self, rollout): return rollout.completion == "right"

def plain(rollout): return 2
async def patient(rollout):
    await asyncio.sleep(0)
    return 3.0
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


@pytest.fixture
async def scorer(file: Path) -> AsyncIterator[Scorer]:
    own = f"{file}:Own"
    environments = {
        "own": EnvironmentConfig(name=own),
        "plain": EnvironmentConfig(name=own, reward=f"{file}:plain"),
        "patient": EnvironmentConfig(name=own, reward=f"{file}:patient"),
        "async verdict": EnvironmentConfig(name=f"{file}:Async"),
        "missing": EnvironmentConfig(name=own, reward=f"{file}:missing"),
    }
    scorer = Scorer(environments, workers=1, deadline_s=1.0)
    yield scorer
    await scorer.close()
    await scorer.close()


def rollout(completion: str, file: Path) -> Rollout:
    from producers.environments.registry import build_environment

    answer = build_environment(EnvironmentConfig(name=f"{file}:Own")).episode("train", 0, 0).answer
    return Rollout("own", 0, "", completion, (), answer, "stop")


async def test_rewards_come_back_and_failures_are_reasons(scorer: Scorer, file: Path) -> None:
    async def score(completion: str, name: str = "own", kind: str = "train") -> Score:
        return await scorer.score(name, kind, rollout(completion, file))  # type: ignore[arg-type]

    assert await score("fine") == Score(0.75, correct=False)
    assert await score("fine", "plain") == Score(2.0, correct=False)
    assert await score("fine", "patient") == Score(3.0, correct=False)
    assert await score("right", kind="eval") == Score(1.0, correct=True)
    assert await score("right") == Score(0.75, correct=True)
    assert await score("wrong", "plain", kind="eval") == Score(0.0, correct=False)
    assert await score("wrong", "async verdict", kind="eval") == Score(0.0, correct=False)
    assert await score("right", "async verdict", kind="eval") == Score(1.0, correct=True)

    raised = (await score("raise")).failure
    assert raised.startswith("reward raised ValueError: bad value xxx")
    assert len(raised) < 400
    assert (await score("stubborn")).failure == "reward raised Stubborn: cannot"
    assert (await score("half")).failure == "reward raised ValueError: half of a pair: \\ud800"
    assert (await score("untellable")).failure == "reward raised Untellable: (its text cannot be had: ValueError)"
    assert (await score("timeout")).failure == "reward raised TimeoutError: its own"
    assert (await score("nan")).failure == "reward is nan, not a finite number"
    assert (await score("text")).failure == "reward returned str, not a number"
    assert "has no object 'missing'" in (await score("fine", "missing")).failure
    assert "SystemExit: 4" in (await score("exit")).failure
    assert await score("fine") == Score(0.75, correct=False)


@pytest.mark.parametrize("how", ["hang", "hang politely"])
async def test_a_reward_that_hangs_is_killed_and_the_others_are_scored(scorer: Scorer, file: Path, how: str) -> None:
    calls = [scorer.score("own", "train", rollout(what, file)) for what in ("fine", how, "fine")]
    async with asyncio.timeout(20):
        before, hung, after = await asyncio.gather(*calls)
    assert hung == Score(failure="reward took longer than 1 s")
    assert before == after == Score(0.75, correct=False)
    assert scorer.open_calls == 0


async def test_a_reward_that_ends_its_process_is_a_reason(scorer: Scorer, file: Path) -> None:
    died = await scorer.score("own", "train", rollout("die", file))
    assert died == Score(failure="reward ended its worker process (exit code 3)")
    signalled = await scorer.score("own", "train", rollout("signal", file))
    assert signalled == Score(failure="reward ended its worker process (signal 40)")
    assert await scorer.score("own", "train", rollout("fine", file)) == Score(0.75, correct=False)


async def test_a_worker_killed_while_idle_is_replaced(scorer: Scorer, file: Path) -> None:
    assert await scorer.score("own", "train", rollout("fine", file)) == Score(0.75, correct=False)
    (worker,) = workers()
    worker.kill()
    for _ in range(20):
        if await scorer.score("own", "train", rollout("fine", file)) == Score(0.75, correct=False):
            return
    pytest.fail("no rollout was scored after the worker was killed")


async def test_what_an_episode_gave_by_itself_is_a_part(file: Path) -> None:
    """Its turns' rewards and its final one; where it gave none, the environment's score."""
    environment = EnvironmentConfig.model_validate(
        {"name": f"{file}:Own", "reward": [{"name": "environment", "weight": 2}, f"{file}:plain"]}
    )
    scorer = Scorer({"own": environment}, workers=1, deadline_s=1.0)
    turns = (Turn("a", "stop", reward=0.25), Turn("b", "stop", reward=-0.5))
    scored = replace(rollout("right", file), turns=turns)
    by_itself = await scorer.score("own", "train", replace(scored, given=4.0))
    assert by_itself == Score(2 * (4.0 - 0.25) + 2, correct=True, parts={"environment": 3.75, f"{file}:plain": 2.0})
    assert (await scorer.score("own", "train", scored)).parts["environment"] == 0.5
    failed = await scorer.score("own", "train", replace(scored, given="much"))  # type: ignore[arg-type]
    assert failed.failure == "reward 'environment' returned str, not a number"
    await scorer.close()


async def test_what_cannot_be_pickled_is_a_reason(scorer: Scorer) -> None:
    unsendable = Rollout("own", 0, "", "", (), lambda: 0, "stop")
    assert "cannot be sent to its reward" in (await scorer.score("own", "train", unsendable)).failure
    nested: list[object] = []
    for _ in range(100_000):
        nested = [nested]
    failure = (await scorer.score("own", "train", replace(unsendable, answer=nested))).failure
    assert "cannot be sent to its reward (RecursionError" in failure


async def test_closing_ends_open_calls_and_leaves_no_process(scorer: Scorer, file: Path) -> None:
    call = asyncio.ensure_future(scorer.score("own", "train", rollout("fine", file)))
    await call
    hanging = asyncio.ensure_future(scorer.score("own", "train", rollout("hang politely", file)))
    waiting = asyncio.ensure_future(scorer.score("own", "train", rollout("fine", file)))
    await asyncio.sleep(0)
    await scorer.close()
    assert not keepers()
    assert (await hanging).failure == "reward was ended with its worker process"
    assert (await waiting).failure == "reward was not reached: the producer ends"


async def test_a_rollout_that_is_cut_costs_no_worker(scorer: Scorer, file: Path) -> None:
    """What computes for it goes on, and what waits for the worker is scored by the same one."""
    assert await scorer.score("own", "train", rollout("fine", file)) == Score(0.75, correct=False)
    before = [worker.pid for worker in workers()]
    cut = asyncio.ensure_future(scorer.score("own", "train", rollout("take a while", file)))
    queued = asyncio.ensure_future(scorer.score("own", "train", rollout("hang", file)))
    after = asyncio.ensure_future(scorer.score("own", "train", rollout("fine", file)))
    await asyncio.sleep(0)
    cut.cancel()
    queued.cancel()
    assert await after == Score(0.75, correct=False)
    assert [worker.pid for worker in workers()] == before
    assert scorer.open_calls == 0


PARENT = """
import asyncio, sys
from headrace.config import EnvironmentConfig
from producers.environments.api import Rollout
from producers.rewards.scorer import Scorer

async def main():
    scorer = Scorer({"arithmetic": EnvironmentConfig(name="arithmetic")}, workers=2, deadline_s=5)
    scorer.start()
    print(await scorer.score("arithmetic", "train", Rollout("arithmetic", 0, "", "11", (), 11, "stop")), flush=True)
    await asyncio.sleep(600)

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_workers_leave_when_their_producer_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert parent.stdout is not None
        assert parent.stdout.readline().startswith("Score(reward=1.0")
        children = psutil.Process(parent.pid).children(recursive=True)
        assert len(children) >= 2
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        parent.stdout.close()  # type: ignore[union-attr]
    until = time.monotonic() + 20
    _, alive = psutil.wait_procs(children, timeout=until - time.monotonic())
    assert not alive


def keepers() -> list[psutil.Process]:
    """Those of reward workers, and none of the other children that this test session has."""
    own = os.getpid()
    return living(lambda process: process.ppid() == own and "producers.rewards.keeper" in process.cmdline())


def workers() -> list[psutil.Process]:
    return [worker for keeper in keepers() for worker in keeper.children()]
