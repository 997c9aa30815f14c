"""Admission: which tasks exist, and when. Nothing here waits; `consumers/loops.py` asks and acts.

With G groups per step, maximum lag L and s = min(1, L) steps reserved for weights on their way, there are
`(L + 1 - s) * G` slots. A task admitted after t batches were formed may start on any version >= t - s. When it is
admitted at most `(L + 1 - s) * G - 1` tasks are before it, so in admission order it is in one of the next
`L + 1 - s` batches, which are formed at steps t … t + L - s: its oldest token is at most `(t + L - s) - (t - s) = L`
steps behind. Outstanding work is bounded by the slots at any time.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from broker.messages import Task
from headrace.errors import ConfigError
from headrace.version import PolicyVersion

ROUNDS = 4
"""Feistel rounds of `shuffled`; four make a strong permutation of a strong round function (Luby and Rackoff, 1988)."""


@dataclass(frozen=True, slots=True)
class Window:
    """The bounds that admission keeps."""

    groups_per_step: int
    max_lag: int
    total_steps: int

    @property
    def reserve(self) -> int:
        """Steps reserved for weights on their way (s)."""
        return min(1, self.max_lag)

    @property
    def slots(self) -> int:
        """Most tasks that are admitted and in no batch yet."""
        return (self.max_lag + 1 - self.reserve) * self.groups_per_step

    def free(self, formed: int, outstanding: int) -> int:
        """How many tasks to admit now: free slots, but no more than the remaining steps can use.

        `formed` counts the batches formed since the run began, `outstanding` the tasks that are in none and not
        judged otherwise.
        """
        remaining = (self.total_steps - formed) * self.groups_per_step
        return max(0, min(self.slots, remaining) - outstanding)

    def min_version(self, formed: int, first: PolicyVersion) -> PolicyVersion:
        """The oldest version that a task admitted now may start on; `first` is the first of this incarnation."""
        return max(PolicyVersion(first.incarnation, formed - self.reserve), first)


@dataclass(frozen=True, slots=True)
class Source:
    """An environment as admission sees it: a name and so many indices."""

    environment: str
    size: int


class Curriculum:
    """The endless, deterministic sequence of training prompts: task n is the same in every run with this seed.

    Environments take turns; each goes through its indices in an order shuffled anew in every epoch.
    """

    def __init__(self, seed: int, sources: tuple[Source, ...]) -> None:
        """Raises ConfigError for an environment without indices."""
        for source in sources:
            if source.size < 1:
                raise ConfigError(f"environment {source.environment!r} has no training prompts")
        self._seed = seed
        self._sources = sources

    def task(self, number: int, *, group_size: int, min_version: PolicyVersion, deadline_ms: int, formed: int) -> Task:
        """Task `number` (from 0), admitted after `formed` batches."""
        source = self._sources[number % len(self._sources)]
        epoch, position = divmod(number // len(self._sources), source.size)
        key = f"{self._seed}/{source.environment}/{epoch}"
        return Task(
            task_id=f"train-{number:08d}",
            kind="train",
            environment=source.environment,
            index=shuffled(position, source.size, key),
            seed=_seed(f"{self._seed}/task/{number}"),
            group_size=group_size,
            min_version=min_version,
            deadline_ms=deadline_ms,
            admitted_step=formed,
        )


def evaluation_tasks(
    when: str, source: Source, prompts: int, *, seed: int, group_size: int, version: PolicyVersion, deadline_ms: int
) -> list[Task]:
    """Held-out prompts 0 … `prompts` - 1, each rolled out `group_size` times on `version` or a newer one.

    `when` is "before" or "after". Both use the same seeds, so that they ask the same. Raises ConfigError when the
    environment has fewer held-out prompts.
    """
    check_held_out(source, prompts)
    return [
        Task(
            task_id=f"eval-{when}-{version.incarnation}-{index:06d}",
            kind="eval",
            environment=source.environment,
            index=index,
            seed=_seed(f"{seed}/eval/{index}"),
            group_size=group_size,
            min_version=version,
            deadline_ms=deadline_ms,
            admitted_step=version.step,
        )
        for index in range(prompts)
    ]


def check_held_out(source: Source, prompts: int) -> None:
    """Raises ConfigError when an evaluation wants more prompts than there are."""
    if prompts > source.size:
        raise ConfigError(
            f"evaluation.prompts = {prompts}: environment {source.environment!r} "
            f"has only {source.size} held-out prompts"
        )


def shuffled(position: int, size: int, key: str) -> int:
    """Where `position` of range(size) goes in the permutation named by `key`; needs no memory, whatever the size.

    A Feistel network on the smallest even number of bits that holds `size`, walked until it is inside the range
    (format-preserving encryption by cycle walking: Black and Rogaway, 2002). The walk takes under four steps on
    average and ends, since the network is a permutation.
    """
    half = max(1, -(-(size - 1).bit_length() // 2))
    mask = (1 << half) - 1
    value = position
    while True:
        left, right = value >> half, value & mask
        for round_ in range(ROUNDS):
            left, right = right, left ^ (_hash(f"{key}/{round_}/{right}") & mask)
        value = left << half | right
        if value < size:
            return value


def _seed(text: str) -> int:
    return _hash(text) & 0x7FFF_FFFF


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
