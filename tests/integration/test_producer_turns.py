"""Environments of several turns in a whole producer: limits, rewards, and setup and teardown around it all."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker.validate import Limits, check_group
from headrace.errors import EnvironmentLoadError
from tests.producers import Setting

OWN = """
from pathlib import Path

from producers.environments.api import Message, Observation
from producers.environments.multi_turn import MultiTurn

class Endless:
    def __init__(self, *, notes, broken=False):
        self.notes, self.broken = Path(notes), broken
    def note(self, text):
        with self.notes.open("a") as file:
            file.write(text + "\\n")
    async def setup(self):
        self.note("setup")
        if self.broken:
            raise OSError("no room")
    async def teardown(self): self.note("teardown")
    def __len__(self): return 8
    def eval_size(self): return 0
    def episode(self, split, index, seed): return Game(self)
    async def score(self, rollout):
        return 10.0 * len(rollout.turns) + sum(turn.reward for turn in rollout.turns)
    def correct(self, rollout): return rollout.finish_reason == "length"

class Game(MultiTurn):
    def __init__(self, environment):
        super().__init__("start", None, lambda turn: Observation((Message("user", "on"),), reward=0.5))
        self.environment = environment
    async def reset(self):
        self.environment.note("reset")
        return await super().reset()
    async def close(self): self.environment.note("close")
"""


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path / "notes"


def noted(notes: Path) -> list[str]:
    return notes.read_text().splitlines()


async def test_episodes_are_cut_scored_and_closed_between_setup_and_teardown(setting: Setting, notes: Path) -> None:
    name = f"{notes.parent}/own.py:Endless"
    entry = {
        "name": name, "label": "endless", "options": {"notes": str(notes)}, "max_turns": 3, "max_tokens_per_turn": 5,
    }  # fmt: skip
    scene = await setting("endless", change={"environments": [entry]}, length_sigma=0.0)
    await scene.trainer.publish(0)
    async with scene.producer():
        assert noted(notes) == ["setup"]
        await scene.trainer.admit("t-1", "t-2")
        await scene.trainer.receive("t-1", "t-2")
    for delivery in scene.trainer.groups.values():
        assert check_group(delivery.group, Limits(256, {"train": 4})) is None
        for member in delivery.group.trajectories:
            # Scored as three turns, of which each carried a reward: once in the sum, once as score saw them.
            assert (member.reward, member.finish_reason, member.correct) == (30 + 1.5 + 1.5, "length", True)
            assert member.loss_mask_T.sum() == 3 * 5
            assert [span.end - span.start for span in member.spans] == [5, 5, 5]
    lines = noted(notes)
    assert (lines[0], lines[-1]) == ("setup", "teardown")
    assert sorted(lines[1:-1]) == ["close"] * 8 + ["reset"] * 8


async def test_a_producer_whose_environment_cannot_be_set_up_says_so_and_tears_down(
    setting: Setting, notes: Path
) -> None:
    entry = {"name": f"{notes.parent}/own.py:Endless", "options": {"notes": str(notes), "broken": True}}
    scene = await setting(change={"environments": [entry]})
    with pytest.raises(EnvironmentLoadError, match="cannot be set up: environment raised OSError: no room"):
        async with scene.producer():
            raise AssertionError("it has begun")
    assert noted(notes) == ["setup", "teardown"]
