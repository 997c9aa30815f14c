"""Whether a part that ended is started again: a pure decision from its history."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.errors import (
    CheckpointError,
    ConfigError,
    EnvironmentLoadError,
    Fenced,
    ModelError,
    Refused,
    ServiceError,
)


@dataclass(frozen=True, slots=True)
class RestartLimits:
    """How often a part may die. Both numbers bound the restarts of a run, whatever happens."""

    in_a_row: int
    """Deaths in a row, none of them after a settled life."""
    in_total: int
    deliveries: int = 0
    """How often a task may end those that play it until it is buried: one that has joined outlives that."""
    settled_s: float = 60.0
    """A part that joined the run and lived this long has settled: its next death is a first one again."""
    first_delay_s: float = 0.5
    longest_delay_s: float = 15.0


LIMITS = {
    "producer": RestartLimits(in_a_row=4, in_total=100),
    "trainer": RestartLimits(in_a_row=3, in_total=10),
    "weights": RestartLimits(in_a_row=4, in_total=20),
    # One that answered and is ended by somebody else is no crash loop, and a run may be long.
    "redis": RestartLimits(in_a_row=4, in_total=100, settled_s=5.0),
}

HOPELESS_CODES = frozenset(
    error.exit_code for error in (ConfigError, ModelError, EnvironmentLoadError, CheckpointError, Fenced)
)
"""What a service exits with when the same start would fail again, or take the run from a newer trainer."""

HOPELESS_AT_START = frozenset({Refused.exit_code, ServiceError.exit_code})
"""The same, for one that never joined: refused, or its port is taken. A broker that is away is no such reason."""


@dataclass(frozen=True, slots=True)
class Death:
    """One end of a part."""

    code: int
    """Exit code; negative for a signal."""
    lived_s: float
    joined: bool
    """Whether the broker had seen it."""
    broker_away: bool = False
    """Whether the broker was away while it lived: then its failing to join says nothing."""


@dataclass(frozen=True, slots=True)
class Restart:
    after_s: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    reason: str


def decide(deaths: list[Death], limits: RestartLimits) -> Restart | GiveUp:
    """What to do after the last of these deaths (oldest first, at least one)."""
    last = deaths[-1]
    if last.code in HOPELESS_CODES or (not last.joined and not last.broker_away and last.code in HOPELESS_AT_START):
        return GiveUp("starting it again would fail the same way")
    if len(deaths) >= limits.in_total:
        return GiveUp(f"it died {len(deaths)} times")
    streak = _streak(deaths, limits)
    joined = any(death.joined for death in deaths[-streak:])
    if streak >= max(limits.in_a_row, limits.deliveries + 1 if joined else 0):
        when = "soon after it started" if joined else "before it had joined the run"
        return GiveUp(f"it died {streak} times in a row, {when}")
    return Restart(min(limits.longest_delay_s, limits.first_delay_s * 2.0 ** (streak - 1)))


def _streak(deaths: list[Death], limits: RestartLimits) -> int:
    """Deaths in a row up to the last. One after a settled life begins a new row."""
    streak = 0
    for death in reversed(deaths):
        streak += 1
        if death.joined and death.lived_s >= limits.settled_s:
            break
    return streak
