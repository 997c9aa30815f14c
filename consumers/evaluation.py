"""Evaluation: how right the policy is on held-out prompts, before the first and after the last step."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from broker.messages import Group, Trajectory
from headrace.errors import CheckpointError

BEFORE = "evaluation-before.json"
"""Kept in the run's folder for a trainer that resumes."""
MOST_EXAMPLES = 6
"""Completions that are kept with their text."""

Decode = Callable[[npt.NDArray[np.int32]], str]
"""Token ids to text."""


@dataclass(frozen=True, slots=True)
class Example:
    """The first rollout of one prompt."""

    index: int
    prompt: str
    completion: str
    reward: float


@dataclass(frozen=True, slots=True)
class Result:
    samples: int
    accuracy: float
    """Mean reward, which for evaluation tasks is 1 for a right rollout and 0 for a wrong one; 0 without samples."""
    failed: int
    """Groups without a sample."""
    examples: tuple[Example, ...]


class Sheet:
    """Collects the groups of one evaluation until each of its tasks has answered."""

    def __init__(self, decode: Decode) -> None:
        self._open: set[str] = set()
        self._closed: set[str] = set()
        self._decode = decode
        self._rewards: list[float] = []
        self._examples: list[Example] = []
        self._failed = 0

    @property
    def closed(self) -> bool:
        return not self._open

    @property
    def missing(self) -> int:
        """Tasks that have not answered yet."""
        return len(self._open)

    def expect(self, task_ids: Collection[str]) -> None:
        """These tasks will answer."""
        self._open.update(task_ids)

    def answers(self, group: Group) -> bool:
        """Enter a group; False when it is of no task of this evaluation. A second group of a task changes nothing."""
        if group.task_id in self._closed:
            return True
        if group.task_id not in self._open:
            return False
        self._open.discard(group.task_id)
        self._closed.add(group.task_id)
        self._rewards += [trajectory.reward for trajectory in group.trajectories]
        if group.trajectories:
            self._keep(group.index, group.trajectories[0])
        else:
            self._failed += 1
        return True

    def result(self) -> Result:
        accuracy = sum(self._rewards) / len(self._rewards) if self._rewards else 0.0
        return Result(len(self._rewards), accuracy, self._failed, tuple(self._examples))

    def _keep(self, index: int, trajectory: Trajectory) -> None:
        """The examples of the smallest indices, so that two evaluations show the same prompts."""
        first = int(np.argmax(trajectory.loss_mask_T))
        example = Example(
            index,
            self._decode(trajectory.token_ids_T[:first]).strip(),
            self._decode(trajectory.token_ids_T[first:]).strip(),
            trajectory.reward,
        )
        self._examples = sorted([*self._examples, example], key=lambda kept: kept.index)[:MOST_EXAMPLES]


def paired(before: Result | None, after: Result | None) -> list[dict[str, Any]]:
    """Prompt, and what was answered before and after, for prompts that either evaluation kept."""
    rows: dict[int, dict[str, Any]] = {}
    for when, result in (("before", before), ("after", after)):
        for example in result.examples if result else ():
            row = rows.setdefault(example.index, {"prompt": example.prompt})
            row[when] = example.completion
            row[f"reward_{when}"] = example.reward
    return [rows[index] for index in sorted(rows)]


def load(file: Path) -> Result | None:
    """A kept result; None when there is none. Raises CheckpointError for one that cannot be read."""
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
        return Result(**{**fields, "examples": tuple(Example(**example) for example in fields["examples"])})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"evaluation {file} cannot be read: {error}; remove it to evaluate again") from error
