"""Two environments of one name in one run: each task is played, scored and judged by the one that it names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from broker.messages import Trajectory
from deploy.inspection import dataset_sizes
from headrace.config import Config
from tests.producers import Setting

REWARD = """
def half(rollout):
    return 0.5 if rollout.environment == "hard" and isinstance(rollout.answer, int) else -1.0
"""


@pytest.fixture
def two(tmp_path: Path) -> list[dict[str, Any]]:
    (tmp_path / "own.py").write_text(REWARD)
    return [
        {"name": "arithmetic", "label": "easy"},
        {
            "name": "arithmetic",
            "label": "hard",
            "options": {"digits": 3, "operators": ["-"], "prompt": "Say {expression} now."},
            "reward": f"{tmp_path}/own.py:half",
        },
    ]


async def test_tasks_are_played_and_scored_by_the_environment_they_name(
    setting: Setting, two: list[dict[str, Any]]
) -> None:
    scene = await setting(change={"environments": two})
    await scene.trainer.publish(0)
    async with scene.producer():
        await scene.trainer.admit("easy-5", environment="easy")
        await scene.trainer.admit("hard-5", environment="hard")
        await scene.trainer.admit("exam-5", environment="hard", kind="eval", group_size=3)
        await scene.trainer.admit("none-5", environment="arithmetic")
        await scene.trainer.receive("easy-5", "hard-5", "exam-5", "none-5")
    groups = {name: delivery.group for name, delivery in scene.trainer.groups.items()}
    assert {name: group.environment for name, group in groups.items()} == {
        "easy-5": "easy", "hard-5": "hard", "exam-5": "hard", "none-5": "arithmetic",
    }  # fmt: skip
    assert prompt(groups["easy-5"].trajectories[0]).startswith("What is ")
    assert prompt(groups["hard-5"].trajectories[0]).startswith("Say ")
    assert [member.reward for member in groups["easy-5"].trajectories] == [0.0] * 4
    assert [member.reward for member in groups["hard-5"].trajectories] == [0.5] * 4
    assert [member.reward for member in groups["exam-5"].trajectories] == [0.0] * 3, "right or wrong, not the reward"
    assert "environment 'arithmetic' is not one of the run's: easy, hard" in groups["none-5"].error


def prompt(trajectory: Trajectory) -> str:
    return bytes(trajectory.token_ids_T[~trajectory.loss_mask_T].astype("u1")).decode()


def test_the_record_says_the_sizes_of_each(two: list[dict[str, Any]]) -> None:
    sizes = dataset_sizes(Config.model_validate({"environments": two}))
    assert sizes == {
        "train/easy": 100 - 24, "eval/easy": 24, "train/hard": 1_000_000 - 24, "eval/hard": 24,
    }  # fmt: skip
