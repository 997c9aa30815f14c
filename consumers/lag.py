"""Lag: how many steps behind the policy a group was sampled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from broker.messages import Group
from headrace.version import PolicyVersion


def token_lag(version: PolicyVersion, step: int, first: PolicyVersion) -> int:
    """Steps between `step`, at which a batch is formed, and the version that sampled a token.

    `first` is the first version of the present incarnation. A token of an older one from beyond it is of a history
    that was given up there: it is as far away as the way back to `first` and from there to `step`.
    """
    given_up = version.step - first.step if version.incarnation < first.incarnation else 0
    return step - version.step + 2 * max(0, given_up)


def group_lag(group: Group, step: int, first: PolicyVersion) -> int:
    """The largest lag of its tokens that enter the loss; 0 when none does."""
    used = (
        span.version
        for trajectory in group.trajectories
        for span in trajectory.spans
        if trajectory.loss_mask_T[span.start : span.end].any()
    )
    return max((token_lag(version, step, first) for version in used), default=0)


def histogram(lags: Iterable[int]) -> dict[int, int]:
    """Lag to number of groups, in order."""
    return dict(sorted(Counter(lags).items()))
