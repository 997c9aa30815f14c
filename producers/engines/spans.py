"""Which policy version sampled which tokens of one sequence, and over which keys and values."""

from __future__ import annotations

from broker.messages import KvState, VersionSpan
from headrace.errors import ConfigError
from headrace.version import PolicyVersion


def recomputes(kv: str) -> bool:
    """Whether a commit makes the engine compute the keys and values of running sequences anew.

    `kv` is `producer.engine_options.kv`. Raises ConfigError for a value that is not known.
    """
    if kv not in ("keep", "recompute"):
        raise ConfigError(f'producer.engine_options.kv = {kv!r} is not known; set it to "keep" or "recompute"')
    return kv == "recompute"


class SpanRecorder:
    """Collects the spans of one sequence while it grows."""

    __slots__ = ("_begins",)

    def __init__(self) -> None:
        self._begins: list[tuple[int, PolicyVersion, KvState]] = []

    @property
    def oldest(self) -> PolicyVersion | None:
        """The version of the first sampled token; None before that."""
        return self._begins[0][1] if self._begins else None

    def note(self, position: int, version: PolicyVersion, cache: PolicyVersion | None) -> None:
        """Token `position` (counted from the first sampled one) comes from the logits of `version`.

        `cache` is the version under which keys and values of the sequence began to be computed.
        """
        kv: KvState = "fresh" if cache == version else "kept"
        if not self._begins or self._begins[-1][1:] != (version, kv):
            self._begins.append((position, version, kv))

    def close(self, count: int) -> tuple[VersionSpan, ...]:
        """The spans of `count` sampled tokens, which they cover without gap."""
        ends = [*(start for start, _, _ in self._begins[1:]), count]
        return tuple(
            VersionSpan(start, end, version, kv)
            for (start, version, kv), end in zip(self._begins, ends, strict=False)
            if start < end
        )
