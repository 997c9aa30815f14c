"""Resuming: which steps are made again from the step log, and what becomes of the other open groups. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from broker.messages import GroupDelivery, StepEntry, StepRecord
from consumers.batch import Batch
from consumers.ingest import SeenTasks, entry
from consumers.lag import group_lag
from headrace.version import PolicyVersion

_BEGINNING = PolicyVersion(0, 0)
"""The steps of the log are one history: none of their tokens is of one that was given up."""


@dataclass(frozen=True, slots=True)
class Replay:
    """What a trainer does with the deliveries that an earlier one left open."""

    batches: tuple[Batch, ...]
    """Steps to make again, in order, with the versions that they had."""
    settled: tuple[StepEntry, ...]
    """Judged before, but perhaps not yet settled."""
    fresh: tuple[GroupDelivery, ...]
    """In no step yet."""
    fork: str
    """Why the step log was not followed to its end; empty when it was."""


def plan_replay(
    records: Sequence[StepRecord], deliveries: Sequence[GroupDelivery], step: int, trained: SeenTasks
) -> Replay:
    """`records` are those after the checkpoint's `step`; `trained` are the tasks that the checkpoint contains.

    A step is made again when it follows the one before and all its groups are still there.
    """
    judged = {item.entry_id: item for record in records for item in record.entries if item.verdict != "trained"}
    settled = [judged[d.entry_id] for d in deliveries if d.entry_id in judged]
    settled += [entry(d, "trained") for d in deliveries if d.group.task_id in trained and d.entry_id not in judged]
    done = {item.entry_id for item in settled}
    there = {d.entry_id: d for d in deliveries if d.entry_id not in done}
    batches: list[Batch] = []
    fork = ""
    for record in records:
        wanted = [item.entry_id for item in record.entries if item.verdict == "trained"]
        missing = sum(entry_id not in there for entry_id in wanted)
        if record.version.step != step + 1:
            fork = f"step {step + 1} is not in the log"
        elif missing:
            fork = f"step {step + 1} lacks {missing} of its {len(wanted)} groups"
        if fork:
            break
        groups = tuple(there.pop(entry_id) for entry_id in wanted)
        lags = tuple(group_lag(delivery.group, step, _BEGINNING) for delivery in groups)
        batches.append(Batch(record.version, groups, lags, ()))
        step += 1
    return Replay(tuple(batches), tuple(settled), tuple(there.values()), fork)
