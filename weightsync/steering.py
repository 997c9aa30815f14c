"""Where an engine is to be brought beside the newest version, and when it may leave the one that it has."""

from __future__ import annotations

from typing import Protocol

from headrace.version import PolicyVersion


class Steering(Protocol):
    """What the receiver asks of whoever plays on the engine; `producers.jobs.Jobs` has it."""

    @property
    def pressing(self) -> bool:
        """Whether `visit` may soon name a version: it is asked often then."""
        ...

    def visit(self) -> PolicyVersion | None:
        """An earlier version that is to be in the engine now; None to follow the newest."""
        ...

    def leaves(self) -> bool:
        """Whether the engine may leave its version now: nothing plays that must end on it.

        Once it may, nothing of that kind begins before the next commit.
        """
        ...

    def unavailable(self, version: PolicyVersion) -> None:
        """A visited version cannot be had here."""
        ...


class Onward:
    """Always the newest version, as soon as it is there."""

    pressing = False

    def visit(self) -> PolicyVersion | None:
        return None

    def leaves(self) -> bool:
        return True

    def unavailable(self, version: PolicyVersion) -> None:
        return
