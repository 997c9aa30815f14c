"""A whole run on a real vLLM server: `headrace up` trains on what it samples, and has it follow."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launches import Launches
from tests.support import wait_here
from tests.vllm_servers import VllmServer

STEPS = 10
PATIENCE_S = 500.0
CONFIG = """
[run]
steps = {steps}
[model]
path = "{model}"
dtype = "float32"
wire_dtype = "float32"
device = "cpu"
context_length = 160
[[environments]]
name = "arithmetic"
[sampling]
max_new_tokens = 48
temperature = 0.8
[producer]
engine = "openai"
slots = 16
[producer.engine_options]
urls = ["{url}"]
[trainer]
groups_per_step = 2
group_size = 4
learning_rate = 1e-4
autocast = "off"  # else it is measured, and the trainer's own log-probs may be those of bfloat16
[staleness]
max_lag = 2
"""


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Launches]:
    made = Launches(tmp_path)
    yield made
    made.close()
    wait_here(lambda: made.processes() == [], "all processes are gone")


@pytest.mark.timeout(900)
def test_ten_steps_with_updates_in_flight(
    launched: Launches, vllm_server: VllmServer, vllm_model: Path, tmp_path: Path
) -> None:
    config = tmp_path / "run.toml"
    config.write_text(CONFIG.format(steps=STEPS, model=vllm_model, url=vllm_server.url))
    process = launched.up("--config", str(config))
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (err, process.returncode) == ("", 0), out
    assert launched.steps() == list(range(1, STEPS + 1))
    lines = [json.loads(line) for line in (launched.run / "steps.jsonl").read_text().splitlines()]
    # The server's log-probs and the trainer's are of the same weights: hardly a ratio leaves the clip range.
    assert max(line["clipped"] for line in lines) < 0.05
    # The first step's rollouts are of the very weights that it starts from.
    assert lines[0]["mismatch"] < 1e-4
    assert launched.summary()["balance"]["train"]["verdicts"]["trained"] == 2 * STEPS
    assert launched.segments == []
