"""Small groups of a given history, for tests of what the trainer does with them."""

from __future__ import annotations

import numpy as np

from broker.messages import Group, GroupDelivery, Outcome, Trajectory, VersionSpan
from headrace.version import PolicyVersion


def trajectory(*steps: int, reward: float = 1.0, masked: tuple[int, ...] = (), incarnation: int = 1) -> Trajectory:
    """A prompt of two tokens, then one sampled token per given version step; `masked` ones are out of the loss."""
    count = len(steps)
    mask = np.array([False, False] + [i not in masked for i in range(count)])
    spans = tuple(VersionSpan(2 + i, 3 + i, PolicyVersion(incarnation, step)) for i, step in enumerate(steps))
    return Trajectory(
        np.arange(2 + count, dtype=np.int32), np.zeros(2 + count, np.float32), mask, spans, reward, "stop"
    )


def group(
    *trajectories: Trajectory,
    task_id: str = "t",
    outcome: Outcome = "played",
    error: str = "",
    failures: tuple[str, ...] = (),
    environment: str = "sums",
    stopped: tuple[int, ...] = (),
) -> Group:
    return Group(task_id, 1, "train", environment, 0, "p", trajectories, failures, outcome, error, stopped)


def delivery(number: int, *steps: int, nbytes: int = 10) -> GroupDelivery:
    """The group of task t<number>, a rollout with one token per given version step."""
    return GroupDelivery(f"{number}-0", nbytes, group(trajectory(*steps), task_id=f"t{number}"))
