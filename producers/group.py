"""One task: its members played and scored beside each other, and what becomes of the group when some fail."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from broker.messages import Group, Task, TaskDelivery, TaskKind
from headrace.objects import shortened
from producers.environments.api import Environment, Rollout
from producers.environments.calls import RolloutFailed
from producers.in_play import InPlay, Member
from producers.rewards.gathering import Gathering
from producers.rewards.worker import Score, added, judged
from producers.rollout import Played, Player, play


class Scores(Protocol):
    """What scores a rollout; `producers.rewards.scorer.Scorer` does."""

    async def score(self, name: str, kind: TaskKind, rollout: Rollout) -> Score: ...

    async def score_group(self, name: str, rollouts: Sequence[Rollout]) -> list[Score]: ...


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
    grouped: frozenset[str] = frozenset()
    """Of these, those with a reward that is relative to the rest of a group."""
    heard: Callable[[Task, int, Played, Score], None] | None = None
    """Is told of each member that was played to its end, and of its score, besides."""


async def play_group(stage: Stage, delivery: TaskDelivery, in_play: InPlay, budget_s: float) -> Group:
    """Play and score all members of a task, until all have ended, the deadline in `budget_s` cuts them, or they are
    stopped (`InPlay.stop`).

    Whatever fails in one is a failure of the group. Raises EngineError for a broken engine; the rest is aborted then.
    """
    task, start = delivery.task, time.monotonic()
    environment = stage.environments.get(task.environment)
    if environment is None:
        known = ", ".join(stage.environments)
        in_play.fail(f"environment {shortened(repr(task.environment))} is not one of the run's: {shortened(known)}")
    else:
        await _play_members(stage, environment, task, in_play, budget_s)
    group = assemble(delivery, stage.producer, in_play.ends(), stage.min_group_size)
    if in_play.stale:
        group = replace(
            group, trajectories=(), failures=(), outcome="stale", error=in_play.stale, stopped_N=in_play.stopped_N
        )
    return replace(group, seconds={**group.seconds, "total": time.monotonic() - start})


async def _play_members(stage: Stage, environment: Environment, task: Task, in_play: InPlay, budget_s: float) -> None:
    deadline = asyncio.get_running_loop().call_later(budget_s, in_play.expire, stage.player.engine)
    gathering: Gathering | None = None
    if task.kind == "train" and task.environment in stage.grouped:
        gathering = Gathering(task.group_size, partial(stage.scorer.score_group, task.environment))
    try:
        async with asyncio.TaskGroup() as tasks:
            for seat, number in zip(in_play.seats, range(task.group_size), strict=True):
                seat.call = tasks.create_task(_member(stage, environment, task, number, in_play, gathering))
    finally:
        deadline.cancel()
        in_play.clear()


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


async def _member(
    stage: Stage, environment: Environment, task: Task, number: int, in_play: InPlay, gathering: Gathering | None
) -> None:
    seat = in_play.seats[number]
    try:
        played = await play(stage.player, environment, task, number, seat.transcript)
        in_play.move(seat, "score")
        member = await _scored(stage, task, number, played, gathering)
    except RolloutFailed as failed:
        member = Member(None, str(failed))
    finally:
        if gathering is not None:
            gathering.out(number)
    # One that was cut has its end already.
    seat.member = seat.member or member
    in_play.move(seat, "end")


async def _scored(stage: Stage, task: Task, number: int, played: Played, gathering: Gathering | None) -> Member:
    start = time.monotonic()
    own = task.kind == "train" and task.environment not in stage.rewarded
    if own and played.reward is not None:
        score = judged(played.reward)
    else:
        score = await stage.scorer.score(task.environment, task.kind, played.rollout)
    if gathering is not None and not score.failure:
        score = added(score, await gathering.join(number, played.rollout))
    if stage.heard is not None:
        stage.heard(task, number, played, score)
    trajectory = None
    if not score.failure:
        reward = score.reward + (played.turn_reward if own else 0.0)
        trajectory = played.transcript.trajectory(reward, played.finish_reason, score.correct)
    return Member(trajectory, score.failure, played.queue_s, played.decode_s, time.monotonic() - start)
