"""Which policy version sampled which tokens, from what the server says of each and what it was asked under."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from broker.messages import KvState, VersionSpan
from headrace.version import PolicyVersion

Kv = Literal["keep", "recompute", "resume"]
"""What a new version makes of running requests: keys and values kept, computed anew, or all asked again."""
PREFIX = "headrace/"
Reported = tuple[str, int, int]
"""Label, first token and end, as the server has it."""


@dataclass(frozen=True, slots=True)
class Labels:
    """Names of versions on a server: "headrace/OWNER/INCARNATION.STEP". The owner is one engine in one run."""

    owner: str

    def of(self, version: PolicyVersion) -> str:
        return f"{PREFIX}{self.owner}/{version}"

    def version(self, label: str) -> PolicyVersion | None:
        """None for a label that this engine did not give."""
        owner, _, version = label.removeprefix(PREFIX).rpartition("/")
        if owner != self.owner or not label.startswith(PREFIX):
            return None
        try:
            return PolicyVersion.parse(version)
        except ValueError:
            return None

    def strange(self, label: str) -> bool:
        """Whether another engine of headrace gave it."""
        return label.startswith(PREFIX) and not label.startswith(f"{PREFIX}{self.owner}/")


def segment_spans(
    count: int, asked: PolicyVersion, reported: Sequence[Reported], labels: Labels, kv: Kv
) -> tuple[VersionSpan, ...] | None:
    """Spans of the `count` tokens that one request to a server gave; None where they cannot be known.

    `asked` is the version whose prefix cache the request could read. Its first tokens are fresh where that version
    sampled them: all keys and values before them are its own, read or just computed. A request that waited at the
    server while another version came may have found the prompt in the older one's cache; not so where each version
    empties that ("recompute", "resume"). Later versions go on over what is there, but for "recompute", where the server
    computes everything anew under each.
    """
    if count == 0:
        return ()
    spans: list[VersionSpan] = []
    for label, start, end in reported:
        version = labels.version(label)
        if version is None or start != (spans[-1].end if spans else 0) or end < start:
            return None
        if start < end:
            fresh = kv == "recompute" or (start == 0 and (kv == "resume" or version == asked))
            spans.append(VersionSpan(start, end, version, "fresh" if fresh else "kept"))
    return tuple(spans) if spans and spans[-1].end == count else None


def whole_segment(count: int, asked: PolicyVersion, reached: PolicyVersion | None) -> tuple[VersionSpan, ...] | None:
    """The same of a server that names no spans: all tokens are of one version, or it is not known where they change.

    `reached` is the version that the server was on when the request had ended.
    """
    if asked != reached:
        return None
    return (VersionSpan(0, count, asked),) if count else ()


def join_spans(segments: Iterable[Sequence[VersionSpan]]) -> tuple[VersionSpan, ...]:
    """The spans of segments that follow one another, each counted from its own first token."""
    spans: list[VersionSpan] = []
    for segment in segments:
        offset = spans[-1].end if spans else 0
        for start, end, version, kv in segment:
            _append(spans, VersionSpan(offset + start, offset + end, version, kv))
    return tuple(spans)


def cut_spans(spans: Sequence[VersionSpan], count: int) -> tuple[VersionSpan, ...]:
    """Of the first `count` tokens alone."""
    return tuple(span._replace(end=min(span.end, count)) for span in spans if span.start < count)


def _append(spans: list[VersionSpan], span: VersionSpan) -> None:
    kv: KvState = span.kv
    if spans and spans[-1][2:] == (span.version, kv):
        spans[-1] = spans[-1]._replace(end=span.end)
    elif span.start < span.end:
        spans.append(span)
