"""The step log as a resumed trainer reads it. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from broker.messages import StepRecord


def replayable(records: Iterable[StepRecord], step: int) -> list[StepRecord]:
    """Records of steps after `step`, in order, of the newest history.

    The log is in the order of appending. A later incarnation that went on from an earlier step forks: what its
    predecessors did from there on is no longer part of the history.
    """
    history: list[StepRecord] = []
    for record in records:
        while history and history[-1].version.step >= record.version.step:
            history.pop()
        history.append(record)
    return [record for record in history if record.version.step > step]
