"""One run while its producers are killed, scaled, started by hand and refused: no step and no task is lost."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from broker.connect import connect_run
from deploy.status import gather
from tests.launches import Launches
from tests.support import wait_here

PATIENCE_S = 200.0
STEPS = 60
CONFIG = """
[run]
steps = {steps}

[model]
path = "{model}"
dtype = "float32"
context_length = 96

[[environments]]
name = "tests/e2e/environments.py:Gated"
options = {{ gate = "{gate}" }}

[sampling]
max_new_tokens = 8

[producer]
slots = 8
lease_s = 2
drain_s = 2
reward_deadline_s = 90

[trainer]
groups_per_step = 2
group_size = 4
autocast = "off"

[broker]
stream_block_ms = 300
"""


class Live:
    """A run whose episodes begin only while its gate is open."""

    def __init__(self, launches: Launches, model: Path) -> None:
        self.launches = launches
        self.gate = launches.folder / "gate"
        self.gate.touch()
        self.model = Path(shutil.copytree(model, launches.folder / "model"))
        file = launches.folder / "run.toml"
        file.write_text(CONFIG.format(steps=STEPS, model=self.model, gate=self.gate))
        self.process = launches.up("--config", str(file), "--run", "live")

    def wait(self, predicate: Callable[[], bool], what: str) -> None:
        def holds() -> bool:
            assert self.process.poll() is None, self.process.communicate()
            return predicate()

        wait_here(holds, what, PATIENCE_S)

    def moves(self, until: Callable[[], bool] | None = None, what: str = "") -> None:
        """Let episodes begin until something holds, else for three more steps."""
        step = len(self.launches.steps())
        self.gate.unlink()
        self.wait(until or (lambda: len(self.launches.steps()) >= step + 3), what or f"steps after {step} are made")
        self.gate.touch()

    def rests(self) -> None:
        """Wait until it stands still, with tasks in its producers' hands."""
        self.wait(lambda: self.status()["queues"]["tasks_held"] > 0, "tasks are held")

    def status(self) -> dict[str, Any]:
        """What `headrace status --json` says."""

        async def ask() -> dict[str, Any]:
            operator = connect_run(self.launches.url(), "live")
            try:
                return await gather("live", operator)
            finally:
                await operator.close()

        return asyncio.run(ask())

    def alive(self) -> set[str]:
        return {peer["name"] for peer in self.status()["processes"] if peer["alive"] and peer["role"] == "producer"}

    def by_hand(self, name: str = "") -> subprocess.Popen[str]:
        named = {"HEADRACE_NAME": name} if name else {}
        return self.launches.python(
            "producers", HEADRACE_REDIS_URL=self.launches.url(), HEADRACE_RUN="live", OMP_NUM_THREADS="1", **named
        )


def test_no_step_and_no_task_is_lost(launched: Launches, tiny_model: Path) -> None:
    live = Live(launched, tiny_model)
    live.moves()
    a_killed_producer_is_replaced(live)
    scaled_up_and_down(live)
    another_model_is_refused(live)
    one_by_hand_comes_and_leaves(live)
    live.gate.unlink()
    out, err = live.process.communicate(timeout=PATIENCE_S)
    assert (err, live.process.returncode) == ("", 0)
    assert "producer-1 died" in out
    assert launched.steps() == list(range(1, STEPS + 1))
    (sheet,) = launched.summary()["balance"].values()
    assert sheet["closed"]
    assert sheet["outstanding"] == 0
    assert set(sheet["verdicts"]) <= {"trained", "stale", "superseded"}
    assert sheet["verdicts"]["trained"] == 2 * STEPS
    assert launched.processes() == []
    assert launched.segments == []


def a_killed_producer_is_replaced(live: Live) -> None:
    live.rests()
    os.kill(live.launches.pid("producer-1"), signal.SIGKILL)
    live.wait(lambda: live.launches.happened("producer-1", "joined") == 2, "the replacement joined")
    live.moves()
    again = [line["task"] for line in groups_of(live, "producer-1") if line["attempt"] > 1]
    assert again, "none of its tasks was taken over"


def scaled_up_and_down(live: Live) -> None:
    grown = live.launches.headrace("scale", "producer", "2")
    assert grown.stdout == "2 producers: producer-2 joined\n", grown.stderr
    live.moves(lambda: bool(groups_of(live, "producer-2")), "the second producer has published")
    shrunk = live.launches.headrace("scale", "producer", "1")
    assert shrunk.stdout == "1 producer: producer-2 drained and left\n", shrunk.stderr
    assert live.alive() == {"producer-1"}
    live.moves()


def another_model_is_refused(live: Live) -> None:
    template = live.model / "chat_template.jinja"
    before = template.read_text()
    template.write_text(before + "!")
    process = live.by_hand("stranger")
    _, err = process.communicate(timeout=PATIENCE_S)
    template.write_text(before)
    assert process.returncode == 3
    said = [line for line in err.splitlines() if line.startswith("stranger: ")]
    assert len(said) == 1
    assert "chat template" in said[0]
    assert "Traceback" not in err
    assert "stranger" not in live.alive()


def one_by_hand_comes_and_leaves(live: Live) -> None:
    process = live.by_hand()
    name = f"producer-{os.uname().nodename}-{process.pid}"
    live.wait(lambda: name in live.alive(), "it has joined")
    live.moves(lambda: bool(groups_of(live, name)), "it has published")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    assert name not in live.alive()


def groups_of(live: Live, producer: str) -> list[dict[str, Any]]:
    return [line for line in live.launches.events(producer) if line["event"] == "group"]
