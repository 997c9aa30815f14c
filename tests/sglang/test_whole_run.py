"""A whole run on a real server: `headrace up` starts it with its producer, trains, and leaves nothing of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.remote_engines import launching, run_config, trained
from tests.sglang_servers import tiny_spec

STEPS = 20


def options(model: Path) -> str:
    spec = tiny_spec(model)
    env = ", ".join(f"{name} = {json.dumps(value)}" for name, value in spec.env.items())
    return f"""
launch = 1
python = "{spec.python}"
server_args = {json.dumps(list(spec.args))}
server_env = {{ {env} }}
"""


@pytest.mark.timeout(900)
def test_twenty_steps_with_updates_in_flight(sglang_model: Path, tmp_path: Path) -> None:
    with launching(tmp_path) as launched:
        trained(
            launched, run_config(sglang_model, "sglang", STEPS, 4, options(sglang_model)), STEPS, "sglang.launch_server"
        )
        (log,) = (launched.run / "logs").glob("sglang-*.log")
        text = log.read_text()
    assert text.count('"POST /update_weights_from_disk HTTP/1.1" 200') > STEPS / 3
    assert '"POST /abort_request' not in text
