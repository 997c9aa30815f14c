"""Producers of other hosts, each with a name and a memory of its own: with a weight service there, and without one."""

from __future__ import annotations

from pathlib import Path

from tests.launches import Launches
from tests.support import wait_here

PATIENCE_S = 200.0
STEPS = 24
CONFIG = """
[run]
steps = {steps}

[model]
path = "{model}"
dtype = "float32"
context_length = 96

[[environments]]
name = "tests/e2e/environments.py:Gated"
options = {{ gate = "{gate}" }}

[sampling]
max_new_tokens = 8

[producer]
count = 0
slots = 8
lease_s = 2
reward_deadline_s = 90

[trainer]
groups_per_step = 2
group_size = 4
autocast = "off"

[broker]
stream_block_ms = 300
"""


def test_weights_reach_producers_of_other_hosts(launched: Launches, tiny_model: Path) -> None:
    gate, config = launched.folder / "gate", launched.folder / "run.toml"
    gate.touch()
    config.write_text(CONFIG.format(steps=STEPS, model=tiny_model, gate=gate))
    process = launched.up("--config", str(config), "--run", "far")
    wait_here((launched.runs / "far" / "connection.json").exists, "Redis serves", PATIENCE_S)

    def elsewhere(host: str) -> dict[str, str]:
        memory = launched.folder / host
        memory.mkdir(exist_ok=True)
        known = {"HEADRACE_REDIS_URL": launched.url(), "HEADRACE_RUN": "far"}
        return {**known, "HEADRACE_HOST": host, "HEADRACE_SHM_DIR": str(memory), "OMP_NUM_THREADS": "1"}

    launched.python("weightsync", "--name", "weights-b", **elsewhere("host-b"))
    for name, host in (("b1", "host-b"), ("b2", "host-b"), ("c1", "host-c")):
        launched.python("producers", "--name", name, **elsewhere(host))

    def kinds(name: str) -> list[str]:
        return [line["kind"] for line in launched.events(name) if line["event"] == "transport"]

    wait_here(lambda: all(map(kinds, ("b1", "b2", "c1"))), "all have their first weights", PATIENCE_S)
    assert (kinds("b1"), kinds("b2"), kinds("c1")) == (["shm"], ["shm"], ["tcp"])
    gate.unlink()
    out, err = process.communicate(timeout=2 * PATIENCE_S)
    assert (process.returncode, err) == (0, ""), out
    imported = [line for line in launched.events("weights-b") if line["event"] == "imported"]
    held = [line for line in imported if line["kind"] == "held"]
    assert held
    assert not [line for line in imported if line["kind"] == "refused"]
    sheet = launched.summary()["balance"]["train"]
    assert sheet["closed"]
    assert sheet["verdicts"]["trained"] == 2 * STEPS
    wait_here(lambda: launched.processes() == [], "all have left", PATIENCE_S)
    assert [file for host in ("host-b", "host-c") for file in (launched.folder / host).iterdir()] == []
