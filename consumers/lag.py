"""Lag: how many steps behind the policy a group was sampled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from broker.messages import Group, Trajectory
from headrace.version import PolicyVersion


def oldest_version(trajectory: Trajectory) -> PolicyVersion | None:
    """The version of its oldest token that enters the loss; None when none does."""
    used = [span.version for span in trajectory.spans if trajectory.loss_mask_T[span.start : span.end].any()]
    return min(used, key=lambda version: version.step, default=None)


def group_lag(group: Group, step: int) -> int:
    """Steps between `step`, at which its batch is formed, and the version of its oldest unmasked token.

    0 when no token enters the loss.
    """
    versions = [oldest_version(trajectory) for trajectory in group.trajectories]
    return max((step - version.step for version in versions if version is not None), default=0)


def histogram(lags: Iterable[int]) -> dict[int, int]:
    """Lag to number of groups, in order."""
    return dict(sorted(Counter(lags).items()))
