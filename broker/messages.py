"""What crosses processes: typed, immutable messages. How they become bytes stands in `broker/codec.py`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.version import PolicyVersion

Schema = Literal[2]
SCHEMA: Schema = 2
"""Schema number of the wire. A process that speaks another one is refused."""

TaskKind = Literal["train", "eval"]
FinishReason = Literal["stop", "length", "abort"]
KvState = Literal["kept", "fresh"]
Outcome = Literal["played", "failed", "stale", "dead", "lost"]
"""What became of a group on its way to the trainer; "dead" and "lost" are said by the broker alone."""

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]
Bool = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Task:
    """One prompt to be rolled out `group_size` times."""

    task_id: str
    kind: TaskKind
    environment: str
    index: int
    seed: int
    group_size: int
    min_version: PolicyVersion
    """The oldest policy version that a rollout of this task may start on."""
    deadline_ms: int
    """On Redis's clock, milliseconds since the epoch."""
    admitted_step: int = 0
    """Trainer step at which it was admitted."""


@dataclass(frozen=True, slots=True)
class TaskDelivery:
    """A task as one producer holds it: `attempt` is its delivery count, from 1."""

    entry_id: str
    attempt: int
    task: Task


class VersionSpan(NamedTuple):
    """Tokens `start` (included) to `end` (excluded) of a trajectory were sampled from `version`.

    `kv` is "kept" where earlier positions' keys and values come from an older version, else "fresh".
    """

    start: int
    end: int
    version: PolicyVersion
    kv: KvState = "fresh"


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """One rollout, whole. Arrays have one entry per token (T), prompt and observations included."""

    token_ids_T: Int32
    logprobs_T: Float32
    """Behaviour log-probabilities under the distribution that was sampled from (nats); 0 where not sampled."""
    loss_mask_T: Bool
    """True for sampled tokens, the only ones that enter the loss."""
    spans: tuple[VersionSpan, ...]
    """Ordered, disjoint; together they cover every sampled token."""
    reward: float
    finish_reason: FinishReason
    correct: bool | None = None
    """Whether its environment counts it as right, whatever the reward; None where nobody said."""


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """The scored rollouts of one task attempt: the unit on the wire, identified by (task_id, attempt)."""

    task_id: str
    attempt: int
    kind: TaskKind
    environment: str
    index: int
    producer: str
    trajectories: tuple[Trajectory, ...]
    failures: tuple[str, ...] = ()
    """A reason per member that failed; a failed rollout is never a sample with reward 0."""
    outcome: Outcome = "played"
    """All but "played" have a reason in `error`, and no trajectories."""
    error: str = ""
    stopped_N: tuple[int, ...] = ()
    """Of a stale group: sampled tokens of each member when it was stopped."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Where its time went on the producer: "queue", "decode", "score", "total"."""


@dataclass(frozen=True, slots=True)
class GroupDelivery:
    """A group as the trainer holds it. The delivery stays open until a durable checkpoint contains its step."""

    entry_id: str
    nbytes: int
    group: Group


Verdict = Literal["trained", "stale", "filtered", "failed", "dead", "superseded", "lost", "evaluated"]
"""What became of an admitted task, once its group was judged."""


@dataclass(frozen=True, slots=True)
class StepEntry:
    """One group in a step record."""

    entry_id: str
    task_id: str
    verdict: Verdict
    reason: str = ""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Appended to stream `steps`, under the fence, before the step runs."""

    version: PolicyVersion
    """The version that this step produces."""
    entries: tuple[StepEntry, ...]
    restored: PolicyVersion | None = None
    """Of a rollback, which trains on no group: the version whose weights this one has."""
