"""A producer in a process of its own whose environment blocks it or clings to it: it ends, with a sentence."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from pathlib import Path
from typing import Any

from tests.producers import Scene, Setting
from tests.support import wait_until

OWN = """
import asyncio, threading
from producers.environments.single_turn import SingleTurn

class Own:
    def __len__(self): return 8
    def eval_size(self): return 0
    def episode(self, split, index, seed):
        if index == 1: blocks()
        return Clings("?", index) if index == 2 else SingleTurn("?", index)
    async def score(self, rollout): return 1.0
    def correct(self, rollout): return True

def blocks():
    threading.Event().wait()

class Clings(SingleTurn):
    async def step(self, turn):
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                pass
"""


async def own(setting: Setting, tmp_path: Path, **change: Any) -> Scene:
    (tmp_path / "own.py").write_text(OWN)
    producer = {"lease_s": 0.6, "reward_deadline_s": 0.2, "drain_s": 0.5}
    broker = {"connect_timeout_s": 2.0, "max_deliveries": 2}
    return await setting(f"{tmp_path}/own.py:Own", change={"producer": producer, "broker": broker, **change})


async def last_words(process: subprocess.Popen[str]) -> str:
    """Of a process that ends by force. What it leaves to Python's resource tracker is told after them."""
    _, said = await asyncio.to_thread(process.communicate, timeout=60)
    assert process.returncode == 7
    return [line for line in said.splitlines() if line.startswith("p1: ")][-1]


async def test_a_task_that_blocks_its_producers_ends_them_and_is_buried(
    setting: Setting, tmp_path: Path, processes: list[subprocess.Popen[str]]
) -> None:
    scene = await own(setting, tmp_path)
    await scene.trainer.publish(0)
    await scene.trainer.admit("blocks-1")
    for _ in range(2):
        processes.append(scene.process("p1"))
        sentence = await last_words(processes[-1])
        assert sentence.startswith(f"p1: environment '{tmp_path}/own.py:Own' with task blocks-1 (")
        assert "has blocked everything for 3.6 s; code that waits or computes for long must be awaitable" in sentence
    processes.append(scene.process("p1"))
    await scene.trainer.admit("fine-3")
    await scene.trainer.receive("blocks-1", "fine-3")
    assert scene.trainer.groups["fine-3"].group.outcome == "played"
    assert scene.trainer.groups["blocks-1"].group.outcome == "dead"
    assert "delivered 2 times, finished by nobody" in scene.trainer.groups["blocks-1"].group.error


async def test_a_call_that_never_ends_does_not_hold_up_the_end(
    setting: Setting, tmp_path: Path, processes: list[subprocess.Popen[str]]
) -> None:
    scene = await own(setting, tmp_path)
    await scene.trainer.publish(0)
    await scene.trainer.admit("clings-2")
    processes.append(scene.process("p1"))
    await scene.trainer.receive("clings-2")
    assert scene.trainer.groups["clings-2"].group.failures == ("environment took longer than 0.2 s",) * 4
    processes[0].send_signal(signal.SIGTERM)
    assert await last_words(processes[0]) == "p1: what was left of it did not end within 5 s; it ends by force"
    await wait_until(lambda: _gone(scene), "it said goodbye")


async def _gone(scene: Scene) -> bool:
    return await scene.peer("p1") == {}
