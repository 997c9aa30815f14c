"""A run whose trainer has two ranks, each with half of the model: one is killed, and the run ends as any other."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM

from tests.launches import Launches
from tests.support import wait_here

PATIENCE_S = 400.0
STEPS = 8
CONFIG = """
[run]
steps = {steps}

[model]
path = "{model}"
context_length = 96

[[environments]]
name = "tests/e2e/environments.py:Gated"
options = {{ gate = "{gate}" }}

[sampling]
max_new_tokens = 8

[producer]
slots = 8

[trainer]
groups_per_step = 2
group_size = 4
autocast = "off"
ranks = 2
parallel = "fsdp"

[checkpoint]
every = 3
"""


def rank_of(launched: Launches) -> dict[str, Any]:
    """The rank beside rank 0, as `headrace status` shows it."""
    found: list[dict[str, Any]] = []

    def shown() -> bool:
        said = json.loads(launched.headrace("status", "--run", "ranks", "--json").stdout)
        found[:] = [peer for peer in said["processes"] if peer["role"] == "rank"]
        return bool(found)

    wait_here(shown, "the rank is shown", PATIENCE_S)
    return found[0]


def test_a_killed_rank_is_started_again_with_its_trainer(launched: Launches, tiny_model: Path) -> None:
    gate, file = launched.folder / "gate", launched.folder / "run.toml"
    gate.touch()
    file.write_text(CONFIG.format(steps=STEPS, model=tiny_model, gate=gate))
    process = launched.up("--config", str(file), "--run", "ranks")

    def wait(predicate: Callable[[], bool], what: str) -> None:
        wait_here(lambda: predicate() or process.poll() is not None, what, PATIENCE_S)
        assert process.poll() is None, process.communicate()

    wait(lambda: launched.happened("trainer", "joined") == 1, "the trainer joined")
    rank = rank_of(launched)
    assert (rank["name"], rank["alive"]) == ("trainer-1", True)
    os.kill(rank["pid"], signal.SIGKILL)
    wait(lambda: launched.happened("trainer", "joined") == 2, "the trainer joined again")
    gate.unlink()
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (err, process.returncode) == ("", 0), out
    log = (launched.run / "logs" / "trainer.log").read_text()
    assert f"trainer: rank 1 (process {rank['pid']}) was killed by SIGKILL, and the trainer ends with it" in log
    assert launched.happened("trainer", "died") == 1
    assert launched.steps() == list(range(1, STEPS + 1))
    sheet = launched.summary()["balance"]["train"]
    assert (sheet["closed"], sheet["outstanding"], sheet["verdicts"]["trained"]) == (True, 0, 2 * STEPS)
    assert AutoModelForCausalLM.from_pretrained(launched.run / "model").num_parameters() > 0
    audit = launched.headrace("audit", "ranks", "--json")
    assert json.loads(audit.stdout)["figures"]["devices"]["training"] == 2, audit.stderr
    assert launched.processes() == []
    assert launched.segments == []
