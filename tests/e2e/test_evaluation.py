"""A run with two producers that is evaluated beside training: no step waits, and its trainer is killed meanwhile."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

from tests.launches import Launches
from tests.support import wait_here

PATIENCE_S = 200.0
STEPS = 40
CONFIG = """
[run]
steps = {steps}

[model]
path = "{model}"
dtype = "float32"
context_length = 96

[[environments]]
name = "tests/e2e/environments.py:Examined"
options = {{ gate = "{gate}" }}

[sampling]
max_new_tokens = 8

[producer]
count = 2
slots = 8
lease_s = 2
drain_s = 2
reward_deadline_s = 200

[trainer]
groups_per_step = 2
group_size = 4
learning_rate = 1e-3
autocast = "off"

[staleness]
max_lag = 2

[evaluation]
every = 10
prompts = 1
samples_per_prompt = 4
max_new_tokens = 4

[checkpoint]
every = 5

[broker]
stream_block_ms = 300
task_deadline_s = 300
"""


def results(run: Path) -> list[dict[str, Any]]:
    """Whole lines only: the trainer may be writing the next."""
    file = run / "evaluations.jsonl"
    text = file.read_text().split("\n")[:-1] if file.exists() else []
    return [line for line in map(json.loads, text) if line["event"] == "result"]


def test_steps_go_on_while_a_version_is_evaluated_and_the_trainer_dies(launched: Launches, tiny_model: Path) -> None:
    gate = launched.folder / "gate"
    file = launched.folder / "run.toml"
    file.write_text(CONFIG.format(steps=STEPS, model=tiny_model, gate=gate))
    process = launched.up("--config", str(file), "--run", "live")

    def wait(predicate: Any, what: str) -> None:
        def holds() -> bool:
            assert process.poll() is None, process.communicate()
            return bool(predicate())

        wait_here(holds, what, PATIENCE_S)

    wait(lambda: launched.runs.exists() and results(launched.run), "the first version is evaluated")
    # Held-out episodes do not begin from now on; the producer that has one is kept by it, the other one trains.
    gate.touch()
    begun = launched.run / "evaluations.jsonl"
    wait(lambda: begun.read_text().count('"begin"') > len(results(launched.run)), "another evaluation has begun")
    step = max(launched.steps(), default=0)
    wait(lambda: max(launched.steps()) >= step + 6, "six more steps are made beside it")
    os.kill(launched.pid("trainer"), signal.SIGKILL)
    wait(lambda: launched.happened("trainer", "joined") == 2, "the next trainer has joined")
    shown = json.loads(launched.headrace("status", "--json").stdout)
    gate.unlink()
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (err, process.returncode) == ("", 0), out
    assert launched.steps() == list(range(1, STEPS + 1))

    summary, made = launched.summary(), results(launched.run)
    sheets = summary["balance"]
    assert all(sheet["closed"] and sheet["outstanding"] == 0 for sheet in sheets.values())
    assert set(sheets["eval"]["verdicts"]) <= {"evaluated", "filtered"}
    assert sheets["eval"]["verdicts"]["evaluated"] == len(made)
    assert [result["samples"] for result in made] == [4] * len(made)
    assert len({result["version"] for result in made}) == len(made)
    assert (made[0]["version"], made[-1]["step"]) == ("1.0", STEPS)
    assert [result["version"] for result in summary["evaluations"]] == [result["version"] for result in made]
    kept = made[1]
    assert kept["version"].startswith("1.")
    assert kept["step"] % 10 == 0
    assert "going" in shown["evaluations"] or shown["evaluations"]["results"][-1]["version"] != "1.0"
    pins = [line for line in launched.events("trainer") if line["event"] == "evaluation_not_pinned"]
    assert pins == []
    assert launched.processes() == []
    assert launched.segments == []


def test_a_version_of_a_run_and_an_exported_folder_are_evaluated_alike(launched: Launches, tiny_model: Path) -> None:
    file = launched.folder / "run.toml"
    file.write_text(CONFIG.format(steps=4, model=tiny_model, gate=launched.folder / "gate"))
    done = launched.headrace("up", "--config", str(file), "--run", "one", "--set", "producer.count=1")
    assert (done.stderr, done.returncode) == ("", 0)
    said = launched.headrace("evaluate", "--run", "one", "--json", "--prompts", "3")
    assert (said.stderr, said.returncode) == ("", 0)
    found = json.loads(said.stdout)
    assert found["of"] == "run one, version 1.4"
    assert (found["samples"], found["failed"], list(found["prompts"].values())) == (12, 0, [3])
    assert set(found["pass_at"]) == {"1", "2", "4"}
    folder = str(launched.run / "model")
    same = json.loads(launched.headrace("evaluate", folder, "--run", "one", "--json", "--prompts", "3").stdout)
    assert same == {**found, "of": folder}, "the export has the same weights, and the seed asks the same"
    shown = launched.headrace("evaluate", "--run", "one", "--version", "1.4")
    assert "run one, version 1.4: 1 held-out prompt, 4 samples each" in shown.stdout
    assert "pass@4" in shown.stdout
    for arguments, sentence in (
        (["--run", "one", "--version", "1.3"], "has no checkpoint of version 1.3, and does not run any more"),
        (["--run", "two"], "there is no run two"),
        ([str(launched.folder / "none")], "is no folder"),
        ([folder, "--version", "1.4"], "name one of the two"),
        (["--run", "one", "--set", "evaluation.sample=8"], "names no value of the run"),
        (["--run", "one", "--prompts", "65"], "has only 64 held-out prompts"),
    ):
        refused = launched.headrace("evaluate", *arguments)
        assert (refused.returncode, refused.stdout) == (2, ""), refused
        assert sentence in refused.stderr
        assert refused.stderr.count("\n") == 1
