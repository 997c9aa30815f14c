"""Lag: how many steps behind the policy a token was sampled, and what becomes of groups that are too old. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from broker.api import Reign
from broker.messages import Group, Trajectory
from headrace.version import PolicyVersion


class History:
    """Where the histories of earlier incarnations were given up.

    An incarnation goes on from the step `first` of the one before. What any earlier one did beyond that step is on a
    branch that ends there.
    """

    def __init__(self, reigns: Mapping[int, Reign]) -> None:
        self._reigns = dict(reigns)
        self._incarnations = sorted(reigns)
        self._forks: list[int] = []
        """For each incarnation, the smallest first step of it and all later ones."""
        for incarnation in reversed(self._incarnations):
            first = reigns[incarnation].first
            self._forks.append(min(first, self._forks[-1]) if self._forks else first)
        self._forks.reverse()

    def until(self, incarnation: int) -> History:
        """As that incarnation knew it: a step that it made is judged as it was then."""
        return History({number: reign for number, reign in self._reigns.items() if number <= incarnation})

    def begun(self, first: PolicyVersion) -> History:
        """With one more incarnation, whose first version this is."""
        return History({**self._reigns, first.incarnation: Reign(first.step, first.step)})

    def given_up(self, first: PolicyVersion) -> int:
        """How many steps the incarnation before published that the one which begins with `first` does not contain."""
        before = [number for number in self._incarnations if number < first.incarnation]
        return max(0, self._reigns[before[-1]].newest - first.step) if before else 0

    def lag(self, version: PolicyVersion, step: int) -> int:
        """Steps between `step`, at which a batch is formed, and the version that sampled a token.

        One sampled at v on a branch that was given up at c < v is as far away as the way back to c and on to `step`.
        """
        later = bisect_right(self._incarnations, version.incarnation)
        astray = version.step - self._forks[later] if later < len(self._forks) else 0
        return step - version.step + 2 * max(0, astray)


@dataclass(frozen=True, slots=True)
class Staleness:
    """`staleness.max_lag` and `staleness.stale`."""

    max_lag: int
    mask: bool = False

    def fit(self, group: Group, step: int, history: History) -> Group | None:
        """What of a group may be trained on at `step`; None where it is stale.

        The group itself where nothing of it is too old. Its arrays are never changed: others hold them, too.
        """
        if group_lag(group, step, history) <= self.max_lag:
            return group
        if not self.mask:
            return None
        members = tuple(self._masked(trajectory, step, history) for trajectory in group.trajectories)
        if not any(trajectory.loss_mask_T.any() for trajectory in members):
            return None
        return replace(group, trajectories=members)

    def _masked(self, trajectory: Trajectory, step: int, history: History) -> Trajectory:
        old = [span for span in trajectory.spans if history.lag(span.version, step) > self.max_lag]
        if not old:
            return trajectory
        mask_T = trajectory.loss_mask_T.copy()
        for span in old:
            mask_T[span.start : span.end] = False
        return replace(trajectory, loss_mask_T=mask_T)


def group_lag(group: Group, step: int, history: History) -> int:
    """The largest lag of its tokens that enter the loss; 0 when none does."""
    used = {
        span.version
        for trajectory in group.trajectories
        for span in trajectory.spans
        if trajectory.loss_mask_T[span.start : span.end].any()
    }
    return max((history.lag(version, step) for version in used), default=0)


def loss_tokens(group: Group) -> int:
    return sum(int(trajectory.loss_mask_T.sum()) for trajectory in group.trajectories)


def histogram(lags: Iterable[int]) -> dict[int, int]:
    """Lag to number of groups, in order."""
    return dict(sorted(Counter(lags).items()))
