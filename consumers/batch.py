"""Batches: whole groups, in the order they came. Lag is judged at the moment a batch is formed."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from broker.messages import GroupDelivery, StepEntry, StepRecord
from consumers.ingest import entry
from consumers.lag import History, Staleness, group_lag, loss_tokens
from headrace.version import PolicyVersion

MOST_NOTES = 4096
"""Verdicts that one step record tells of."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What one optimizer step trains on."""

    version: PolicyVersion
    """The version that the step produces."""
    deliveries: tuple[GroupDelivery, ...]
    """Their groups without the tokens that are too old."""
    lags: tuple[int, ...]
    """Lag of each group when the batch was formed, in steps: that of its oldest token in the loss."""
    verdicts: tuple[StepEntry, ...] = ()
    """Groups judged otherwise since the batch before, the newest of them."""
    masked: int = 0
    """Tokens that left the loss."""
    restored: PolicyVersion | None = None
    """Of a rollback, which trains on nothing: the version whose weights it takes back."""

    @property
    def nbytes(self) -> int:
        return sum(delivery.nbytes for delivery in self.deliveries)

    @property
    def trained(self) -> tuple[StepEntry, ...]:
        return tuple(entry(delivery, "trained") for delivery in self.deliveries)

    @property
    def record(self) -> StepRecord:
        """What is appended to stream `steps` before the step runs."""
        return StepRecord(self.version, self.trained + self.verdicts, self.restored)


class Batcher:
    """Groups that wait for a batch. Admission bounds how many there are, and their bytes."""

    def __init__(self, groups_per_step: int, rule: Staleness) -> None:
        self._size = groups_per_step
        self._rule = rule
        self._ready: deque[GroupDelivery] = deque()
        self._verdicts: deque[StepEntry] = deque(maxlen=MOST_NOTES)
        self.nbytes = 0
        """Of the groups that wait."""

    def __len__(self) -> int:
        return len(self._ready)

    def add(self, delivery: GroupDelivery) -> None:
        self._ready.append(delivery)
        self.nbytes += delivery.nbytes

    def note(self, verdict: StepEntry) -> None:
        """A group was judged otherwise: the next step record says so."""
        self._verdicts.append(verdict)

    def missing(self) -> int:
        """Groups that the next batch still lacks."""
        return max(0, self._size - len(self._ready))

    def drop_stale(self, step: int, history: History) -> list[tuple[GroupDelivery, str]]:
        """Remove groups of which nothing may be trained on at `step`; returns them with the reason, to be settled."""
        fresh: deque[GroupDelivery] = deque()
        stale: list[tuple[GroupDelivery, str]] = []
        for delivery in self._ready:
            if self._rule.fit(delivery.group, step, history) is None:
                stale.append((delivery, f"lag {group_lag(delivery.group, step, history)}"))
            else:
                fresh.append(delivery)
        self._ready = fresh
        self.nbytes -= sum(delivery.nbytes for delivery, _ in stale)
        return stale

    def give_up(self) -> list[GroupDelivery]:
        """Remove all; returns them, to be settled."""
        given_up = [*self._ready]
        self._ready.clear()
        self.nbytes = 0
        return given_up

    def form(self, step: int, history: History, incarnation: int) -> Batch | None:
        """The batch of the step after `step`, or None when groups are missing. Call `drop_stale` with it before."""
        if len(self._ready) < self._size:
            return None
        chosen = [self._ready.popleft() for _ in range(self._size)]
        self.nbytes -= sum(delivery.nbytes for delivery in chosen)
        verdicts = tuple(self._verdicts)
        self._verdicts.clear()
        return batch_of(PolicyVersion(incarnation, step + 1), chosen, self._rule, history, verdicts)


def batch_of(
    version: PolicyVersion,
    chosen: list[GroupDelivery],
    rule: Staleness,
    history: History,
    verdicts: tuple[StepEntry, ...] = (),
) -> Batch:
    """The batch of the step that makes `version`, from groups of which something is left.

    The same groups, rule and history give the same tokens and lags, whenever it is asked.
    """
    step = version.step - 1
    deliveries = tuple(
        replace(delivery, group=rule.fit(delivery.group, step, history) or delivery.group) for delivery in chosen
    )
    masked = sum(loss_tokens(d.group) for d in chosen) - sum(loss_tokens(d.group) for d in deliveries)
    lags = tuple(group_lag(delivery.group, step, history) for delivery in deliveries)
    return Batch(version, deliveries, lags, verdicts, masked)
