"""One task: its members played and scored beside each other, and what becomes of the group when some fail."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from broker.messages import Group, Task, TaskDelivery, TaskKind, Trajectory
from producers.environments.api import Environment, Rollout
from producers.rewards.worker import Score, judged
from producers.rollout import Played, Player, RolloutFailed, play


class Scores(Protocol):
    """What scores a rollout; `producers.rewards.scorer.Scorer` does."""

    async def score(self, name: str, kind: TaskKind, rollout: Rollout) -> Score: ...


@dataclass(slots=True)
class Occupancy:
    """How many rollouts of one task are where. `changed`, which tasks share, is set whenever one moves on."""

    playing: int
    scoring: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def move(self, *, playing: int = 0, scoring: int = 0) -> None:
        self.playing += playing
        self.scoring += scoring
        self.changed.set()


@dataclass(frozen=True, slots=True)
class Member:
    """What became of one member: a trajectory, or the reason why there is none."""

    trajectory: Trajectory | None
    failure: str = ""
    queue_s: float = 0.0
    decode_s: float = 0.0
    score_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Stage:
    """What all groups of a producer share."""

    producer: str
    player: Player
    environments: dict[str, Environment]
    scorer: Scores
    min_group_size: int
    rewarded: frozenset[str] = frozenset()
    """Environments with a reward that the user named: it counts, whatever an episode gives by itself."""


async def play_group(stage: Stage, delivery: TaskDelivery, occupancy: Occupancy) -> Group:
    """Play and score all members of a task, which `occupancy` counts as playing from the start.

    Whatever fails in one is a failure of the group. Raises EngineError for a broken engine; the rest is aborted then.
    """
    task, start = delivery.task, time.monotonic()
    environment = stage.environments.get(task.environment)
    if environment is None:
        occupancy.move(playing=-task.group_size)
        failure = f"environment {task.environment!r} is not one of the run's: {', '.join(stage.environments)}"
        members = [Member(None, failure)] * task.group_size
    else:
        async with asyncio.TaskGroup() as tasks:
            calls = [
                tasks.create_task(_member(stage, environment, task, number, occupancy))
                for number in range(task.group_size)
            ]
        members = [call.result() for call in calls]
    group = assemble(delivery, stage.producer, members, stage.min_group_size)
    return replace(group, seconds={**group.seconds, "total": time.monotonic() - start})


def assemble(delivery: TaskDelivery, producer: str, members: Sequence[Member], min_group_size: int) -> Group:
    """The rule: with at least `min_group_size` good members the group goes on without the others, else it has failed.

    An evaluation judges each member by itself, so that one good member is enough. `seconds` are those of the
    slowest member: "queue" until it had slots, "decode" in them, "score" until its reward.
    """
    task = delivery.task
    good = tuple(member.trajectory for member in members if member.trajectory is not None)
    failures = tuple(member.failure for member in members if member.trajectory is None)
    needed = 1 if task.kind == "eval" else min(min_group_size, task.group_size)
    error = ""
    if len(good) < needed:
        (most_common, _), *_ = Counter(failures).most_common(1)
        error, good = f"{len(failures)} of {len(members)} rollouts failed: {most_common}", ()
    return Group(
        task_id=task.task_id,
        attempt=delivery.attempt,
        kind=task.kind,
        environment=task.environment,
        index=task.index,
        producer=producer,
        trajectories=good,
        failures=failures,
        outcome="failed" if error else "played",
        error=error,
        seconds={
            "queue": max((member.queue_s for member in members), default=0.0),
            "decode": max((member.decode_s for member in members), default=0.0),
            "score": max((member.score_s for member in members), default=0.0),
        },
    )


def failed_group(delivery: TaskDelivery, producer: str, error: str) -> Group:
    """A group that failed as a whole."""
    members = [Member(None, error)] * delivery.task.group_size
    return replace(assemble(delivery, producer, members, 1), outcome="failed", error=error)


async def _member(stage: Stage, environment: Environment, task: Task, number: int, occupancy: Occupancy) -> Member:
    try:
        played = await play(stage.player, environment, task, number)
    except RolloutFailed as failed:
        return Member(None, str(failed))
    finally:
        occupancy.move(playing=-1)
    occupancy.move(scoring=1)
    try:
        return await _scored(stage, task, played)
    finally:
        occupancy.move(scoring=-1)


async def _scored(stage: Stage, task: Task, played: Played) -> Member:
    start = time.monotonic()
    if task.kind == "train" and played.reward is not None and task.environment not in stage.rewarded:
        score = judged(played.reward)
    else:
        score = await stage.scorer.score(task.environment, task.kind, played.rollout)
    trajectory = None
    if not score.failure:
        trajectory = played.transcript.trajectory(score.reward, played.finish_reason, score.correct)
    return Member(trajectory, score.failure, played.queue_s, played.decode_s, time.monotonic() - start)
