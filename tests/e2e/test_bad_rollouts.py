"""Runs in which something goes on going wrong: rewards, prompts, the disk."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM

from tests.launches import Launches
from tests.support import wait_here

PATIENCE_S = 200.0
OWN = "tests/e2e/environments.py"


def settings(launches: Launches, model: Path, environment: str, **sections: dict[str, Any]) -> Path:
    """A configuration file of few, small steps."""
    tree: dict[str, Any] = {
        "run": {"steps": 4},
        "model": {"path": str(model), "dtype": "float32", "context_length": 96},
        "sampling": {"max_new_tokens": 8},
        "producer": {"slots": 8, "reward_deadline_s": 3.0},
        "trainer": {"groups_per_step": 4, "group_size": 4, "autocast": "off"},
        "broker": {"stream_block_ms": 300},
    }
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values}
    lines = [f"environments = [{environment}]"]
    for name, values in tree.items():
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
    file = launches.folder / "run.toml"
    file.write_text("\n".join(lines))
    return file


def test_groups_without_a_reward_fail_with_their_reason_and_the_run_goes_on(
    launched: Launches, tiny_model: Path
) -> None:
    environment = f'{{name = "{OWN}:Counting", reward = "{OWN}:partly_broken"}}'
    file = settings(launched, tiny_model, environment, run={"steps": 16})
    done = launched.headrace("up", "--config", str(file))
    assert (done.stderr, done.returncode) == ("", 0)
    assert launched.steps() == list(range(1, 17))
    sheet = launched.summary()["balance"]["train"]
    assert sheet["closed"]
    assert sheet["outstanding"] == 0
    assert sheet["verdicts"]["trained"] == 64
    reasons = {reason: count for reason, count in sheet["reasons"].items() if reason.startswith("failed: ")}
    assert sum(reasons.values()) == sheet["verdicts"]["failed"]
    raised = [reason for reason in reasons if "rollouts failed: reward raised ValueError: no reward for " in reason]
    late = [reason for reason in reasons if reason == "failed: 4 of 4 rollouts failed: reward took longer than 3 s"]
    assert sorted(raised + late) == sorted(reasons)
    assert len(raised) > 5
    assert len(late) == 1


def test_prompts_that_do_not_fit_end_the_run_with_a_sentence(launched: Launches, tiny_model: Path) -> None:
    environment = f'{{name = "{OWN}:Counting", options = {{padding = 200}}}}'
    done = launched.headrace("up", "--config", str(settings(launched, tiny_model, environment)))
    assert done.returncode == 7
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert "groups all failed; the newest: 4 of 4 rollouts failed: prompt of " in done.stderr
    assert "tokens leaves no room for an answer in a context of 96 (model.context_length)" in done.stderr
    assert launched.steps() == []
    assert not launched.happened("trainer", "replaced"), "the next one would fail as this one did"
    assert launched.processes() == []
    assert launched.segments == []


def test_a_disk_that_is_full_is_waited_for(launched: Launches, tiny_model: Path) -> None:
    """A limit on the size of the trainer's files stands in for the disk."""
    sections: dict[str, dict[str, Any]] = {"run": {"steps": 30}, "checkpoint": {"every": 3}}
    file = settings(launched, tiny_model, f'{{name = "{OWN}:Counting"}}', **sections)
    process = launched.up("--config", str(file), "--run", "full")
    checkpoints = launched.runs / "full" / "checkpoints" / "1"
    wait_here((checkpoints / "00000003" / "state.json").exists, "a checkpoint is there", PATIENCE_S)
    largest = max(file.stat().st_size for file in checkpoints.rglob("*") if file.is_file())
    trainer = launched.pid("trainer")
    resource.prlimit(trainer, resource.RLIMIT_FSIZE, (largest - 1000, resource.RLIM_INFINITY))

    def failed() -> list[int]:
        return [line["step"] for line in launched.events("trainer") if line["event"] == "checkpoint_failed"]

    wait_here(lambda: bool(failed()), "a checkpoint cannot be written", PATIENCE_S)

    def said() -> bool:
        status = launched.headrace("status", "--run", "full").stdout.replace("\n", "")
        return f"checkpoint {checkpoints}" in status and "cannot be written" in status

    wait_here(said, "`headrace status` says so", PATIENCE_S)
    whole = sorted(folder.name for folder in checkpoints.iterdir() if folder.name.isdigit())
    assert whole
    assert int(whole[-1]) < failed()[0]
    exported = launched.headrace("export", "full", str(launched.folder / "exported"))
    assert exported.returncode == 0, exported.stderr
    assert AutoModelForCausalLM.from_pretrained(launched.folder / "exported").num_parameters() > 0

    resource.prlimit(trainer, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    _, err = process.communicate(timeout=2 * PATIENCE_S)
    assert (err, process.returncode) == ("", 0)
    assert launched.pid("trainer") == trainer, "it was never replaced"
    assert launched.processes() == []
    assert launched.segments == []
    assert launched.summary()["steps"] == 30
    sheet = launched.summary()["balance"]["train"]
    assert sheet["closed"]
    assert sheet["outstanding"] == 0
    assert sheet["verdicts"]["trained"] == 4 * 30
