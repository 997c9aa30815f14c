"""What becomes of a group entry at its arrival: decoded, validated, or refused with a reason. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from broker.api import Reign, RunRecord
from broker.codec import decode_groups
from broker.leases import counted
from broker.messages import Group
from broker.validate import MAX_GROUP_BYTES, Limits
from headrace.errors import WireError
from headrace.version import PolicyVersion


@dataclass(frozen=True, slots=True)
class Arrival:
    """A group entry as it lies in the broker, its fields not yet believed."""

    entry_id: str
    task_id: str
    attempt: str
    kind: str
    producer: str
    body: bytes
    dead: str = ""
    """Set by the broker where the task itself went to `dead`, with the reason; there is no body then."""
    lost: str = ""
    """As `dead`, where Redis lost the group and the trainer had it."""

    def group(self, limits: Limits) -> Group:
        """Decode and validate. Raises WireError with the reason."""
        (found,) = groups_of([self], limits)
        if isinstance(found, WireError):
            raise found
        return found

    def refusal(self) -> WireError | None:
        """Why it is not even decoded."""
        if self.dead or self.lost:
            return WireError(self.dead or self.lost)
        if len(self.body) > MAX_GROUP_BYTES:
            return WireError(
                f"an entry of {len(self.body)} bytes, more than the {MAX_GROUP_BYTES} that a group may have"
            )
        return None

    def named(self, group: Group) -> Group | WireError:
        """The group, if it is the one that the entry's fields name."""
        pairs = (("task", self.task_id, group.task_id), ("attempt", self.attempt, str(group.attempt)))
        for name, field, inside in (*pairs, ("kind", self.kind, group.kind)):
            if field != inside:
                return WireError(f"field {name} of the entry is {field[:40]!r}, in its body {inside[:40]!r}")
        return group

    def refused(self, reason: str) -> Group:
        """What stands for a group that lies in `dead`: it has no rollouts, and frees its task's slot."""
        return Group(
            task_id=self.task_id,
            attempt=counted(self.attempt) or 0,
            kind="eval" if self.kind == "eval" else "train",
            environment="",
            index=0,
            producer=self.producer,
            trajectories=(),
            outcome="lost" if self.lost else "dead",
            error=reason,
        )


def groups_of(arrivals: Sequence[Arrival], limits: Limits) -> list[Group | WireError]:
    """The group of each, decoded and validated, or why there is none."""
    refusals = [arrival.refusal() for arrival in arrivals]
    bodies = [arrival.body for arrival, refusal in zip(arrivals, refusals, strict=True) if refusal is None]
    decoded = iter(decode_groups(bodies, limits))
    found = [refusal or next(decoded) for refusal in refusals]
    return [
        group if isinstance(group, WireError) else arrival.named(group)
        for arrival, group in zip(arrivals, found, strict=True)
    ]


def unpublished(group: Group, reigns: Mapping[int, Reign]) -> PolicyVersion | None:
    """A version in the group's spans that no incarnation published; None when there is none."""
    for version in {span.version for member in group.trajectories for span in member.spans}:
        reign = reigns.get(version.incarnation)
        if reign is None or not reign.first <= version.step <= reign.newest:
            return version
    return None


def limits_of(record: RunRecord) -> Limits:
    """The limits that follow from a run's record."""
    train = _number(record.config, "trainer", "group_size")
    evaluation = _number(record.config, "evaluation", "samples_per_prompt")
    limits = Limits(record.vocab_size, {})
    if train is not None:
        limits.group_sizes["train"] = train
    if evaluation is not None:
        limits.group_sizes["eval"] = evaluation
    return limits


def _number(config: dict[str, Any], section: str, name: str) -> int | None:
    value = config.get(section, {}).get(name)
    return value if isinstance(value, int) else None
