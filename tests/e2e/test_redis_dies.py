"""A whole run whose own Redis is killed again and again, or emptied: all come back to it, every task accounted for."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import psutil
import redis

from tests.launches import Launches
from tests.support import wait_here

PATIENCE_S = 200.0
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
engine_options = {{ step_s = 0.05 }}
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


def start(launched: Launches, tiny_model: Path, run: str) -> subprocess.Popen[str]:
    file = launched.folder / "run.toml"
    model = shutil.copytree(tiny_model, launched.folder / "model")
    file.write_text(CONFIG.format(steps=STEPS, model=model))
    process = launched.up("--config", str(file), "--run", run)
    wait_here((launched.runs / run).exists, "there is a run", PATIENCE_S)
    wait_here(lambda: launched.happened("trainer", "joined") > 0, "the trainer is there", PATIENCE_S)
    return process


def test_a_run_goes_on_over_deaths_of_its_redis(launched: Launches, tiny_model: Path) -> None:
    process = start(launched, tiny_model, "killed")
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


def test_a_run_goes_on_from_its_checkpoint_when_redis_is_emptied_while_the_trainer_is_dead(
    launched: Launches, tiny_model: Path
) -> None:
    process = start(launched, tiny_model, "emptied")
    wait_here(lambda: max(launched.steps(), default=0) > 7, "a checkpoint, and steps", PATIENCE_S)
    trainer = psutil.Process(launched.pid("trainer"))

    def beyond() -> bool:
        """Whether it stands still with steps that no checkpoint contains."""
        trainer.suspend()
        saved = (launched.runs / "emptied" / "checkpoints").glob("*/*/state.json")
        found = max(launched.steps()) > max(int(file.parent.name) for file in saved)
        if not found:
            trainer.resume()
        return found

    wait_here(beyond, "it stands still between two checkpoints", PATIENCE_S)
    with redis.Redis.from_url(launched.url()) as client:
        client.flushall()
    trainer.kill()
    _, err = process.communicate(timeout=PATIENCE_S)
    assert (err, process.returncode) == ("", 0)
    assert launched.happened("run", "put back") == 1
    assert sorted(set(launched.steps())) == list(range(1, STEPS + 1))
    assert not any(launched.happened(part, "died") for part in ("producer-1", "weights"))
    (forked,) = [line for line in launched.events("trainer") if line["event"] == "forked"]
    assert forked["step"] % 5 == 0 < forked["step"]
    sheet = launched.summary()["balance"]["train"]
    assert sheet["closed"], sheet
    assert sheet["verdicts"]["trained"] == 2 * (STEPS - forked["step"])
    assert not sheet["verdicts"].get("dead")
