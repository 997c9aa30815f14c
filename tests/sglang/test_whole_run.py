"""A whole run on a real server: `headrace up` starts it with its producer, trains, and leaves nothing of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launches import Launches
from tests.sglang_servers import tiny_spec
from tests.support import wait_here

STEPS = 20
PATIENCE_S = 800.0


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Launches]:
    made = Launches(tmp_path)
    yield made
    made.close()
    wait_here(lambda: made.processes() == [], "all processes are gone")


def written(config: Path, model: Path) -> Path:
    """The run's configuration."""
    spec = tiny_spec(model)
    env = "\n".join(f"{name} = {value!r}" for name, value in spec.env.items())
    config.write_text(
        f"""
[run]
steps = {STEPS}
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
[producer]
engine = "sglang"
slots = 16
[producer.engine_options]
launch = 1
python = "{spec.python}"
server_args = {json.dumps(list(spec.args))}
[producer.engine_options.server_env]
{env}
[trainer]
groups_per_step = 2
group_size = 4
learning_rate = 1e-4
autocast = "off"
[staleness]
max_lag = 4
"""
    )
    return config


@pytest.mark.timeout(900)
def test_twenty_steps_with_updates_in_flight(launched: Launches, sglang_model: Path, tmp_path: Path) -> None:
    config = written(tmp_path / "run.toml", sglang_model)
    process = launched.up("--config", str(config))
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (err, process.returncode) == ("", 0), out
    assert launched.steps() == list(range(1, STEPS + 1))
    lines = [json.loads(line) for line in (launched.run / "steps.jsonl").read_text().splitlines()]
    # The server's log-probs and the trainer's are of the same weights: hardly a ratio leaves the clip range.
    assert max(line["clipped"] for line in lines) < 0.05
    # The first step's rollouts are of the very weights that it starts from.
    assert lines[0]["mismatch"] < 1e-4
    logs = list((launched.run / "logs").glob("sglang-*.log"))
    assert len(logs) == 1
    text = logs[0].read_text()
    loads = text.count('"POST /update_weights_from_disk HTTP/1.1" 200')
    assert loads > STEPS / 3
    assert '"POST /abort_request' not in text
    assert launched.summary()["balance"]["train"]["verdicts"]["trained"] == 2 * STEPS
    wait_here(lambda: launched.processes() == [], "the server went with its producer")
    assert launched.segments == []
