"""The curriculum: which prompt comes when, known from its number alone. Pure."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from broker.messages import Task
from consumers.shares import counts, order, shares
from headrace.config import Config
from headrace.errors import ConfigError
from headrace.version import PolicyVersion

ROUNDS = 4
"""Feistel rounds of `shuffled`; four make a strong permutation of a strong round function (Luby and Rackoff, 1988)."""


@dataclass(frozen=True, slots=True)
class Source:
    """An environment as admission sees it: a name, so many indices, and what part of the prompts it should have."""

    environment: str
    size: int
    weight: float = 1.0
    min_share: float = 0.0


@dataclass(frozen=True, slots=True)
class Prompt:
    """Training prompt `number` (from 0), asked again for the `again`th time: "train-00000012.1"."""

    number: int
    again: int = 0

    @property
    def task_id(self) -> str:
        return f"train-{self.number:08d}" + (f".{self.again}" if self.again else "")

    @property
    def next(self) -> Prompt:
        return Prompt(self.number, self.again + 1)

    @classmethod
    def of(cls, task_id: str) -> Prompt | None:
        """The inverse of `task_id`; None for the id of another kind of task."""
        found = _TASK_ID.fullmatch(task_id)
        return cls(int(found[1]), int(found[2] or 0)) if found else None


_TASK_ID = re.compile(r"train-([0-9]{8,18})(?:\.([0-9]{1,4}))?")


class Curriculum:
    """The endless, deterministic sequence of training prompts: prompt n is the same in every run with this seed.

    Environments have their shares of it, spread evenly; each goes through its indices in an order shuffled anew in
    every epoch.
    """

    def __init__(self, seed: int, sources: Sequence[Source]) -> None:
        """Raises ConfigError for an environment that has a share and no indices."""
        self._seed = seed
        self._sources = tuple(sources)
        exact = shares([source.weight for source in sources], [source.min_share for source in sources])
        for source, share in zip(sources, exact, strict=True):
            if share and source.size < 1:
                raise ConfigError(f"environment {source.environment!r} has no training prompts")
        self._counts = counts(exact)
        self._cycle: list[tuple[int, int]] = []
        """Whose turn each place is, and how many turns that environment had in the cycle before it."""
        had = [0] * len(self._sources)
        for turn in order(self._counts):
            self._cycle.append((turn, had[turn]))
            had[turn] += 1

    def task(
        self, prompt: Prompt, *, group_size: int, min_version: PolicyVersion, deadline_ms: int, formed: int
    ) -> Task:
        """The task that asks this prompt, admitted after `formed` batches; asked again it is the same but its id."""
        cycle, place = divmod(prompt.number, len(self._cycle))
        turn, before = self._cycle[place]
        source = self._sources[turn]
        epoch, position = divmod(cycle * self._counts[turn] + before, source.size)
        key = f"{self._seed}/{source.environment}/{epoch}"
        return Task(
            task_id=prompt.task_id,
            kind="train",
            environment=source.environment,
            index=shuffled(position, source.size, key),
            seed=_seed(f"{self._seed}/task/{prompt.number}"),
            group_size=group_size,
            min_version=min_version,
            deadline_ms=deadline_ms,
            admitted_step=formed,
        )


def sources_of(config: Config, sizes: Mapping[str, int]) -> tuple[Source, ...]:
    """The environments to train on; `sizes` as in the run's record. Raises ConfigError."""
    return tuple(
        Source(one.called, _size(sizes, f"train/{one.called}"), one.weight, one.min_share)
        for one in config.environments
    )


def held_out_of(config: Config, sizes: Mapping[str, int]) -> tuple[Source, ...]:
    """The environments to evaluate on. Sizes matter only where there is an evaluation. Raises ConfigError."""
    labels = config.evaluation.environment or (config.environments[0].called,)
    return tuple(Source(label, _size(sizes, f"eval/{label}") if config.evaluation.prompts else 0) for label in labels)


def held_out_task(
    task_id: str,
    environment: str,
    index: int,
    *,
    seed: int,
    group_size: int,
    version: PolicyVersion,
    deadline_ms: int,
) -> Task:
    """Held-out prompt `index`, rolled out on exactly `version`; under one seed it is the same in every evaluation."""
    return Task(
        task_id=task_id,
        kind="eval",
        environment=environment,
        index=index,
        seed=_seed(f"{seed}/eval/{index}"),
        group_size=group_size,
        min_version=version,
        deadline_ms=deadline_ms,
        admitted_step=version.step,
    )


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


def _size(sizes: Mapping[str, int], key: str) -> int:
    if key not in sizes:
        raise ConfigError(f"the run's record does not say how many prompts {key} has; start it with this release")
    return sizes[key]
