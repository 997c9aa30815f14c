"""Runs whose trainer and producers share one device, in turns or at the same time; and what kills do to them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from audit.ledger import read
from audit.records import read_lines
from tests.launches import Launches
from tests.support import wait_here

PATIENCE_S = 200.0
CONFIG = """
[run]
steps = {steps}
placement = "{placement}"

[model]
path = "{model}"
context_length = 128

[[environments]]
name = "tests/audit/slow.py:Sums"

[sampling]
max_new_tokens = 64

[producer]
engine = "{engine}"
engine_options = {options}
slots = 8
lease_s = 2
drain_s = 2

[trainer]
groups_per_step = 2
group_size = 4
autocast = "off"

[staleness]
max_lag = {max_lag}

[checkpoint]
every = 4

[broker]
stream_block_ms = 300
"""
TRAINS = {"forward_backward", "optimizer"}
DECODES = {"prefill", "decode", "recompute"}


def config(
    folder: Path, model: Path, placement: str, *, engine: str = "torch", max_lag: int = 0, steps: int = 8
) -> str:
    file = folder / "run.toml"
    options = "{ length_mean = 32.0, step_s = 0.02 }" if engine == "scripted" else "{}"
    text = CONFIG.format(model=model, placement=placement, engine=engine, options=options, max_lag=max_lag, steps=steps)
    file.write_text(text)
    return str(file)


def together_s(run: Path) -> float:
    """Seconds in which the trainer computed a step while an engine decoded."""
    trained, decoded = worked(run, "trainer", TRAINS), worked(run, "engine", DECODES)
    assert trained
    assert decoded
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in trained for b in decoded)


def worked(run: Path, lane: str, phases: set[str]) -> list[tuple[float, float]]:
    """When lanes of this name were in these phases. Of a record that has only sums nobody knows."""
    found = []
    for line in (line for file in run.glob("*.jsonl") for line in read_lines(file)):
        if line.get("event") == "spans" and line["lane"] == lane:
            begin = float(line["begin"])
            for phase, seconds in line.get("spans", ()):
                if phase in phases:
                    found.append((begin, begin + seconds))
                begin += seconds
    return found


def finished(launched: Launches, process: object, steps: int) -> None:
    out, err = process.communicate(timeout=PATIENCE_S)  # type: ignore[attr-defined]
    assert process.returncode == 0, out + err  # type: ignore[attr-defined]
    assert launched.steps() == list(range(1, steps + 1))
    assert all(sheet["closed"] for sheet in launched.summary()["balance"].values())
    assert launched.processes() == []
    assert launched.segments == []


@pytest.mark.parametrize(("engine", "max_lag"), [("torch", 2), ("scripted", 0)])
def test_on_one_device_they_never_compute_at_the_same_time(
    launched: Launches, tiny_model: Path, tmp_path: Path, engine: str, max_lag: int
) -> None:
    file = config(tmp_path, tiny_model, "colocated", engine=engine, max_lag=max_lag)
    finished(launched, launched.up("--config", file), 8)
    assert together_s(launched.run) < 0.02
    waits = {phase for lane in read(launched.run).lanes for phase in lane.seconds()}
    assert "wait_device" in waits


def test_side_by_side_on_one_device_nobody_waits_for_it(launched: Launches, tiny_model: Path, tmp_path: Path) -> None:
    finished(launched, launched.up("--config", config(tmp_path, tiny_model, "hybrid", max_lag=2)), 8)
    waits = {phase for lane in read(launched.run).lanes for phase in lane.seconds()}
    assert "wait_device" not in waits


@pytest.mark.parametrize("placement", ["colocated", "hybrid"])
def test_what_does_not_fit_into_one_device_is_refused(
    launched: Launches, tiny_model: Path, tmp_path: Path, placement: str
) -> None:
    file = config(tmp_path, tiny_model, placement)
    told = launched.headrace(
        "up", "--config", file, "--set", "model.context_length=10000000", "--set", "producer.slots=4096"
    )
    assert told.returncode == 2
    assert f"run.placement: '{placement}' needs at least" in told.stderr
    assert "keys and values" in told.stderr
    assert "Traceback" not in told.stderr
    assert not launched.runs.exists() or list(launched.runs.iterdir()) == []


@pytest.mark.parametrize("victim", ["trainer", "producer-1"])
def test_one_that_is_killed_in_its_turn_loses_it(
    launched: Launches, tiny_model: Path, tmp_path: Path, victim: str
) -> None:
    process = launched.up("--config", config(tmp_path, tiny_model, "colocated", steps=12))
    for wanted in (3, 7):
        wait_here(lambda wanted=wanted: len(launched.steps()) >= wanted, f"{wanted} steps are made", PATIENCE_S)
        os.kill(launched.pid(victim), signal.SIGKILL)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, out + err
    assert sorted(set(launched.steps())) == list(range(1, 13))
    assert launched.happened(victim, "replaced") == 2
    assert all(sheet["closed"] for sheet in launched.summary()["balance"].values())
    assert together_s(launched.run) < 0.02


def test_more_producers_on_it_take_turns_and_leave_in_order(
    launched: Launches, tiny_model: Path, tmp_path: Path
) -> None:
    process = launched.up(
        "--config", config(tmp_path, tiny_model, "colocated", max_lag=2, steps=1000), "--run", "shared"
    )
    wait_here(lambda: len(launched.steps()) >= 3, "steps are made", PATIENCE_S)
    told = launched.headrace("scale", "producer", "2", "--run", "shared")
    assert "producer-2 joined" in told.stdout, told.stdout + told.stderr
    begun = len(launched.steps())
    wait_here(lambda: len(launched.steps()) >= begun + 3, "steps are made by two", PATIENCE_S)
    told = launched.headrace("scale", "producer", "1", "--run", "shared")
    assert "drained and left" in told.stdout, told.stdout + told.stderr
    begun = len(launched.steps())
    wait_here(lambda: len(launched.steps()) >= begun + 3, "steps are made by one", PATIENCE_S)
    assert launched.headrace("stop", "--run", "shared").returncode == 0
    process.communicate(timeout=PATIENCE_S)
    assert together_s(launched.run) < 0.02
    assert launched.processes() == []
