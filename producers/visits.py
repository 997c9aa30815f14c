"""Visits: how evaluations come to be played on exactly their version, while the engine follows the newest. Pure.

An evaluation task may start on its own version alone, which the trainer keeps in memory for it. Where the engine has
that version, it stays there until the evaluations that play have ended; the next version is staged meanwhile. Where the
engine is past it, the producer takes nothing new, and once what it plays is decoded, goes back for as long as its
evaluations play. Training tasks begin neither on a version that is only visited nor on one that stays past its time;
those that would have to wait for evaluations are given back, so that other producers can have them.
"""

from __future__ import annotations

from collections.abc import Collection

from headrace.version import PolicyVersion
from producers.holding import Held


def stays(held: Collection[Held]) -> bool:
    """Whether a rollout plays that must end on the version that is in the engine."""
    return any(task.evaluates and _plays(task) for task in held)


def visit(held: Collection[Held], version: PolicyVersion | None, head: PolicyVersion | None) -> PolicyVersion | None:
    """The earlier version that the engine is to go to now; None where it is to follow the head.

    A training task that waits for a newer version comes first: it has been taken for one that is there by now.
    """
    waiting = [task for task in held if task.waits_for_version and not task.lost]
    if head is None or any(not task.evaluates for task in waiting) or any(map(_plays, held)):
        return None
    wanted = (task.delivery.task.min_version for task in waiting if not task.unavailable)
    return next((one for one in wanted if one != version and one < head), None)


def outlives(version: PolicyVersion | None, head: PolicyVersion | None, max_lag: int) -> bool:
    """Whether a rollout that begins on this version now could hardly be trained on: it is `max_lag` behind already."""
    return version is not None and head is not None and head.step - version.step >= max(1, max_lag)


def pressing(held: Collection[Held]) -> bool:
    """Whether an evaluation waits for its version."""
    return any(task.evaluates and task.waits_for_version for task in held)


def _plays(task: Held) -> bool:
    """Also what was lost: it goes on until that is said twice, and may come again."""
    return not task.waits_for_version and not task.held_back and bool(task.in_play.playing)
