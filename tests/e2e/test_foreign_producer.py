"""A real trainer that has no producer but one of another make, from the document alone."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from tests.launches import CHECKOUT, Launches
from tests.support import wait_here

PATIENCE_S = 200.0
CONFIG = """
[run]
steps = 3

[model]
path = "{model}"
dtype = "float32"
context_length = 96

[[environments]]
name = "arithmetic"

[sampling]
max_new_tokens = 8

[producer]
count = 0

[trainer]
groups_per_step = 2
group_size = 4
autocast = "off"

[broker]
stream_block_ms = 300
"""


def test_a_run_is_trained_on_what_a_foreign_producer_plays(
    launched: Launches, tiny_model: Path, redis_url: str
) -> None:
    model = shutil.copytree(tiny_model, launched.folder / "model")
    file = launched.folder / "run.toml"
    file.write_text(CONFIG.format(model=model))
    environ = {"HEADRACE_REDIS_URL": redis_url, "HEADRACE_RUN": "foreign"}
    process = launched.up("--config", str(file), "--run", "foreign", **environ)
    wait_here((launched.runs / "foreign").exists, "there is a run", PATIENCE_S)
    wait_here(lambda: launched.happened("trainer", "joined") > 0, "the trainer is there", PATIENCE_S)
    status = launched.headrace("status", **environ)
    assert "no producer plays" in status.stdout
    scripts = launched.folder / "scripts"
    assert launched.headrace("scripts", str(scripts)).returncode == 0
    player = subprocess.Popen(
        [sys.executable, CHECKOUT / "examples" / "foreign_producer.py", scripts],
        env=environ,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        _, err = process.communicate(timeout=PATIENCE_S)
        assert (err, process.returncode) == ("", 0)
        assert launched.steps() == [1, 2, 3]
        sheet = launched.summary()["balance"]["train"]
        assert sheet["closed"]
        assert sheet["verdicts"]["trained"] == 6
        assert player.communicate(timeout=30)[1] == ""
        assert player.returncode == 0
        lines = (launched.run / "launcher.jsonl").read_text().splitlines()
        assert not any(json.loads(line)["event"] == "died" for line in lines)
    finally:
        player.kill()
        player.communicate()
        assert launched.headrace("runs", "delete", "foreign", **environ).returncode == 0
