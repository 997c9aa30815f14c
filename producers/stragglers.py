"""Rollouts that nobody can use any more: decided from versions, without waiting for anything."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.version import PolicyVersion
from producers.engines.api import Engine
from producers.holding import Held


def out_of_reach(oldest: PolicyVersion | None, head: PolicyVersion | None, max_lag: int) -> bool:
    """Whether every batch that is still to be formed is more than `max_lag` steps ahead of a token.

    The trainer has made `head.step` steps when it publishes the head, so the lag of a group that is not published yet
    is at least the difference of the steps. For a token of an older incarnation it may be more, never less.
    """
    return oldest is not None and head is not None and head.step - oldest.step > max_lag


def stragglers(held: Iterable[Held], engine: Engine, head: PolicyVersion | None, max_lag: int) -> list[Held]:
    """Tasks whose group the trainer would drop as stale. An evaluation has no lag, and what is on its way is judged
    by the trainer."""
    return [
        task
        for task in held
        if task.delivery.task.kind == "train"
        and not task.publishing
        and not task.in_play.stale
        and out_of_reach(task.in_play.oldest(engine), head, max_lag)
    ]


def reason(max_lag: int) -> str:
    """The same for all, so that they are counted together."""
    return f"stopped while it was played: more than staleness.max_lag = {max_lag} steps behind"
