"""Batches: whole groups, in the order they came. Lag is judged at the moment a batch is formed."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from broker.messages import GroupDelivery, StepEntry, StepRecord
from consumers.ingest import entry
from consumers.lag import group_lag
from headrace.version import PolicyVersion


@dataclass(frozen=True, slots=True)
class Batch:
    """What one optimizer step trains on."""

    version: PolicyVersion
    """The version that the step produces."""
    deliveries: tuple[GroupDelivery, ...]
    lags: tuple[int, ...]
    """Lag of each group when the batch was formed, in steps."""
    verdicts: tuple[StepEntry, ...]
    """Groups judged otherwise since the batch before."""

    @property
    def nbytes(self) -> int:
        return sum(delivery.nbytes for delivery in self.deliveries)

    @property
    def trained(self) -> tuple[StepEntry, ...]:
        return tuple(entry(delivery, "trained") for delivery in self.deliveries)

    @property
    def record(self) -> StepRecord:
        """What is appended to stream `steps` before the step runs."""
        return StepRecord(self.version, self.trained + self.verdicts)


class Batcher:
    """Groups that wait for a batch. Admission bounds how many there are."""

    def __init__(self, groups_per_step: int, max_lag: int) -> None:
        self._size = groups_per_step
        self._max_lag = max_lag
        self._ready: deque[GroupDelivery] = deque()
        self._verdicts: list[StepEntry] = []

    def __len__(self) -> int:
        return len(self._ready)

    def add(self, delivery: GroupDelivery) -> None:
        self._ready.append(delivery)

    def note(self, verdict: StepEntry) -> None:
        """A group was judged otherwise: the next step record says so."""
        self._verdicts.append(verdict)

    def missing(self) -> int:
        """Groups that the next batch still lacks."""
        return max(0, self._size - len(self._ready))

    def drop_stale(self, step: int, first: PolicyVersion) -> list[StepEntry]:
        """Remove groups whose lag at `step` is over the bound; returns their verdicts, to be settled.

        `first` is the first version of this trainer's incarnation.
        """
        fresh: deque[GroupDelivery] = deque()
        stale: list[StepEntry] = []
        for delivery in self._ready:
            lag = group_lag(delivery.group, step, first)
            if lag > self._max_lag:
                stale.append(entry(delivery, "stale", f"lag {lag}"))
            else:
                fresh.append(delivery)
        self._ready = fresh
        self._verdicts += stale
        return stale

    def form(self, step: int, first: PolicyVersion) -> Batch | None:
        """The batch of the step after `step`, or None when groups are missing. Call `drop_stale` with it before."""
        if len(self._ready) < self._size:
            return None
        deliveries = tuple(self._ready.popleft() for _ in range(self._size))
        lags = tuple(group_lag(delivery.group, step, first) for delivery in deliveries)
        verdicts, self._verdicts = tuple(self._verdicts), []
        return Batch(PolicyVersion(first.incarnation, step + 1), deliveries, lags, verdicts)
