"""Resuming: which steps are made again from the step log, and what becomes of the other open groups. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from broker.messages import GroupDelivery, StepEntry, StepRecord
from consumers.batch import Batch, batch_of
from consumers.ingest import SeenTasks, entry
from consumers.lag import History, Staleness
from headrace.version import PolicyVersion


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
    records: Sequence[StepRecord],
    deliveries: Sequence[GroupDelivery],
    step: int,
    seen: SeenTasks,
    rule: Staleness,
    history: History,
    gone: Mapping[PolicyVersion, str],
) -> Replay:
    """`records` are those after the checkpoint's `step`; `seen` has the verdicts that the checkpoint contains; `gone`
    says why versions that were restored cannot be had again.

    A step is made again when it follows the one before and all its groups are still there, or the weights that it
    restored. Which of its tokens were too old is judged as the incarnation did that made it.
    """
    logged = {item.entry_id: item for record in records for item in record.entries if item.verdict != "trained"}
    settled = [judged for d in deliveries if (judged := _judged(d, logged, seen))]
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
        elif record.restored is not None and record.restored in gone:
            fork = f"step {step + 1} restored weights that cannot be had again: {gone[record.restored]}"
        if fork:
            break
        groups = [there.pop(entry_id) for entry_id in wanted]
        batch = batch_of(record.version, groups, rule, history.until(record.version.incarnation))
        batches.append(replace(batch, restored=record.restored))
        step += 1
    return Replay(tuple(batches), tuple(settled), tuple(there.values()), fork)


def _judged(delivery: GroupDelivery, logged: dict[str, StepEntry], seen: SeenTasks) -> StepEntry | None:
    """The verdict that an earlier trainer gave, where it did."""
    if delivery.entry_id in logged:
        return replace(logged[delivery.entry_id], task_id=delivery.group.task_id)
    verdict = seen.verdict(delivery.group.task_id)
    return entry(delivery, verdict) if verdict else None
