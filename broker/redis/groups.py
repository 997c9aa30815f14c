"""What the readers of stream `groups` share."""

from __future__ import annotations

from typing import Any, cast

from broker.api import RunRecord
from broker.messages import Group, TaskKind
from broker.redis.link import Fields, text
from broker.validate import Limits


def limits_of(record: RunRecord) -> Limits:
    """The limits that follow from a run's record."""
    sizes = {"train": _number(record.config, "trainer", "group_size")}
    sizes["eval"] = _number(record.config, "evaluation", "samples_per_prompt")
    return Limits(record.vocab_size, {cast(TaskKind, kind): size for kind, size in sizes.items() if size is not None})


def dead_group(fields: Fields, reason: str) -> Group:
    """What stands for a group that lies in `dead`: it has no rollouts, and frees its task's slot."""
    attempt = text(fields.get(b"attempt"))
    return Group(
        task_id=text(fields.get(b"task")),
        attempt=int(attempt) if attempt.isdecimal() else 0,
        kind="eval" if fields.get(b"kind") == b"eval" else "train",
        environment="",
        index=0,
        producer=text(fields.get(b"producer")),
        trajectories=(),
        error=f"dead: {reason}",
    )


def _number(config: dict[str, Any], section: str, name: str) -> int | None:
    value = config.get(section, {}).get(name)
    return value if isinstance(value, int) else None
