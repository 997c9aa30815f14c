"""The tally: which groups were kept and which were not, by length, by reward and by environment.

Dropping what is stale hits long rollouts and hard prompts first. That can only be seen where kept and dropped ones are
counted alike.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection
from typing import Any

from broker.messages import Group, Verdict
from headrace.telemetry.metrics import Metrics

TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
REWARDS = (-1.0, -0.5, 0.0, 0.25, 0.5, 0.75, 1.0)
OTHER = "other"
"""The label of a group that names no environment of this run."""

Bars = dict[str, dict[str, int]]
"""Verdict to upper bound to rollouts."""


class Tally:
    """Counts since the step before, and since the start in the metrics."""

    def __init__(self, metrics: Metrics, environments: Collection[str]) -> None:
        self._metrics = metrics
        self._environments = frozenset(environments)
        self._begin()

    def count(self, group: Group, verdict: Verdict) -> None:
        """One group that was judged, with its rollouts. Of one that was stopped early, its tokens by then."""
        label = group.environment if group.environment in self._environments else OTHER
        labels = {"verdict": verdict, "environment": label}
        self._groups[label, verdict] += 1
        self._metrics.count("trainer_groups", 1, help="Groups by what became of them", **labels)
        tokens = [sum(span.end - span.start for span in one.spans) for one in group.trajectories]
        for length in tokens or group.stopped_N:
            self._tokens[verdict, bisect_left(TOKENS, length)] += 1
            self._metrics.observe(
                "trainer_rollout_tokens", length, buckets=TOKENS, help="Sampled tokens of a rollout", **labels
            )
        for one in group.trajectories:
            self._rewards[verdict, bisect_left(REWARDS, one.reward)] += 1
            self._metrics.observe("trainer_rollout_reward", one.reward, buckets=REWARDS, help="Reward", **labels)

    def take(self) -> dict[str, Any]:
        """What was counted since the last call, for the line of a step; counting begins anew."""
        groups: dict[str, int] = {}
        environments: dict[str, dict[str, int]] = {}
        for (label, verdict), count in sorted(self._groups.items()):
            groups[verdict] = groups.get(verdict, 0) + count
            environments.setdefault(label, {})[verdict] = count
        taken = {"groups": groups, "tokens": _bars(self._tokens, TOKENS), "rewards": _bars(self._rewards, REWARDS)}
        self._begin()
        return taken if len(self._environments) < 2 else {**taken, "environments": environments}

    def _begin(self) -> None:
        self._groups: Counter[tuple[str, Verdict]] = Counter()
        self._tokens: Counter[tuple[Verdict, int]] = Counter()
        self._rewards: Counter[tuple[Verdict, int]] = Counter()


def _bars(counted: Counter[tuple[Verdict, int]], bounds: tuple[float, ...]) -> Bars:
    names = [*(f"{bound:g}" for bound in bounds), "more"]
    bars: Bars = {}
    for (verdict, place), count in sorted(counted.items()):
        bars.setdefault(verdict, {})[names[place]] = count
    return bars
