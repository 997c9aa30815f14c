"""A run that goes back to a pinned version while it trains, and whose trainer is killed right after."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from consumers import checkpoint
from headrace.version import PolicyVersion
from tests.launches import Launches
from tests.support import wait_here

PATIENCE_S = 200.0
CONFIG = """
[run]
steps = 100000

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
slots = 8
lease_s = 2
drain_s = 2

[trainer]
groups_per_step = 2
group_size = 4
learning_rate = 1e-3
autocast = "off"

[checkpoint]
keep = 100000
"""


class Live:
    """A run whose episodes begin only while its gate is open."""

    def __init__(self, launches: Launches, model: Path) -> None:
        self.launches = launches
        self.gate = launches.folder / "gate"
        file = launches.folder / "run.toml"
        file.write_text(CONFIG.format(model=model, gate=self.gate))
        self.process = launches.up("--config", str(file), "--run", "live")

    def trains(self, steps: int) -> None:
        """Wait for so many more."""
        made = len(self.launches.steps()) + steps

        def reached() -> bool:
            assert self.process.poll() is None, self.process.communicate()
            return len(self.launches.steps()) >= made

        wait_here(reached, f"step {made} is made", PATIENCE_S)

    def weights(self, *arguments: str) -> str:
        done = self.launches.headrace("weights", *arguments)
        assert (done.stderr, done.returncode) == ("", 0)
        return done.stdout

    def versions(self) -> dict[str, dict[str, Any]]:
        return {row["version"]: row for row in json.loads(self.weights("list", "--json"))}

    def pinned(self) -> str:
        """The newest version. Those of the groups that are still played when the gate closes may come after it."""
        found: list[str] = []

        def pins() -> bool:
            # By name it may be freed before the command has started.
            done = self.launches.headrace("weights", "pin", "head")
            found[:] = done.stdout.partition("keeps weight version ")[2].split()[:1]
            return done.returncode == 0

        wait_here(pins, "the newest version is pinned", PATIENCE_S)
        return found[0]

    def exported(self, version: str) -> dict[str, torch.Tensor]:
        out = self.launches.folder / f"exported-{version}"
        self.weights("export", version, str(out))
        return load_file(out / "model.safetensors")

    def rolled_back(self, version: str) -> str:
        said = self.weights("rollback", version)
        assert said.endswith(f" of run live has the weights of {version}, and training goes on\n")
        return said.split()[2]


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    assert ours.keys() == theirs.keys()
    return all(torch.equal(ours[name].view(torch.int16), theirs[name].view(torch.int16)) for name in theirs)


def test_weights_are_taken_back_while_training_goes_on_and_survive_the_trainer(
    launched: Launches, tiny_model: Path
) -> None:
    live = Live(launched, tiny_model)
    live.trains(3)
    live.gate.touch()
    pinned = live.pinned()
    content = live.exported(pinned)
    live.gate.unlink()
    live.trains(4)
    row = live.versions()[pinned]
    assert (row["pinned"], row["head"], row["state"], row["here"]) == (True, False, "sealed", True)

    restored = live.rolled_back(pinned)
    os.kill(launched.pid("trainer"), signal.SIGKILL)
    wait_here(lambda: launched.happened("trainer", "joined") == 2, "the next trainer has joined", PATIENCE_S)
    in_checkpoint = checkpoint.load(checkpoint.folder_of(launched.run, PolicyVersion.parse(restored)))
    rounded = {name: tensor.to(torch.bfloat16) for name, tensor in in_checkpoint.model.items()}
    assert same({name: rounded[name] for name in content}, content)
    live.trains(3)
    lines = [json.loads(line) for line in (launched.run / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert [line["version"] for line in lines if line.get("restored") == pinned] == [restored]
    assert lines[-1]["version"].startswith("2.")

    live.gate.touch()
    again = live.rolled_back(pinned)
    assert again.startswith("2.")
    assert same(live.exported(again), content), "the pin outlived its trainer"
    live.gate.unlink()
    live.trains(2)
    stopped = launched.headrace("stop")
    assert (stopped.stderr, stopped.returncode) == ("", 0)
    _, err = live.process.communicate(timeout=PATIENCE_S)
    assert (err, live.process.returncode) == ("", 0)
    assert launched.processes() == []
    assert launched.segments == []
