"""Which policy version sampled which tokens of one sequence."""

from __future__ import annotations

from broker.messages import VersionSpan
from headrace.version import PolicyVersion


class SpanRecorder:
    """Collects the spans of one sequence while it grows."""

    __slots__ = ("_first", "_starts", "_versions")

    def __init__(self, first: PolicyVersion) -> None:
        """`first` is the version under which the sequence's prompt enters the cache."""
        self._first = first
        self._starts: list[int] = []
        self._versions: list[PolicyVersion] = []

    @property
    def oldest(self) -> PolicyVersion | None:
        """The version of the first sampled token; None before that."""
        return self._versions[0] if self._versions else None

    def note(self, position: int, version: PolicyVersion) -> None:
        """Token `position` (counted from the first sampled one) comes from the logits of `version`."""
        if not self._versions or self._versions[-1] != version:
            self._starts.append(position)
            self._versions.append(version)

    def close(self, count: int) -> tuple[VersionSpan, ...]:
        """The spans of `count` sampled tokens, which they cover without gap.

        Keys and values are "kept" from an older version in every span but those of the first version.
        """
        ends = [*self._starts[1:], count] if self._starts else []
        return tuple(
            VersionSpan(start, end, version, "fresh" if version == self._first else "kept")
            for start, end, version in zip(self._starts, ends, self._versions, strict=True)
            if start < end
        )
