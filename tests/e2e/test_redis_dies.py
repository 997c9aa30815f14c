"""A whole run whose own Redis is killed again and again: all come back to it, and every task is accounted for."""

from __future__ import annotations

import shutil
from pathlib import Path

import psutil

from tests.launches import Launches
from tests.support import wait_here

PATIENCE_S = 100.0
STEPS, KILLS = 40, 3
CONFIG = """
[run]
steps = {steps}

[model]
path = "{model}"
dtype = "float32"
context_length = 96

[[environments]]
name = "arithmetic"

[sampling]
max_new_tokens = 8

[producer]
engine = "scripted"
slots = 8
lease_s = 2
drain_s = 2

[trainer]
groups_per_step = 2
group_size = 4
autocast = "off"

[checkpoint]
every = 5

[broker]
stream_block_ms = 300
"""


def test_a_run_goes_on_over_deaths_of_its_redis(launched: Launches, tiny_model: Path) -> None:
    file = launched.folder / "run.toml"
    model = shutil.copytree(tiny_model, launched.folder / "model")
    file.write_text(CONFIG.format(steps=STEPS, model=model))
    process = launched.up("--config", str(file), "--run", "killed")
    wait_here((launched.runs / "killed").exists, "there is a run", PATIENCE_S)
    wait_here(lambda: launched.happened("trainer", "joined") > 0, "the trainer is there", PATIENCE_S)
    for kills in range(KILLS):
        newest = max(launched.steps(), default=0)
        wait_here(lambda newest=newest: max(launched.steps(), default=0) > newest + 1, "more steps", PATIENCE_S)
        (redis,) = [child for child in psutil.Process(process.pid).children() if "redis" in child.name()]
        redis.kill()
        wait_here(lambda kills=kills: launched.happened("redis", "replaced") == kills + 1, "it is back", PATIENCE_S)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert (err, process.returncode) == ("", 0)
    assert sorted(set(launched.steps())) == list(range(1, STEPS + 1))
    for part in ("trainer", "producer-1", "weights"):
        assert launched.happened(part, "died") == 0
    sheet = launched.summary()["balance"]["train"]
    assert sheet["closed"], sheet
    assert sheet["outstanding"] == 0
