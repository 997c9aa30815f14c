"""Versions of an SGLang server's tokens: from its own report, from the outside, over several requests."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from broker.messages import VersionSpan
from headrace.version import PolicyVersion
from producers.engines.remote.spans import Kv, Labels, cut_spans, join_spans, segment_spans, whole_segment

OURS = Labels("run.1a")
V = [PolicyVersion(1, step) for step in range(6)]
MODES = st.sampled_from(["keep", "recompute", "resume"])


def report(*ends: tuple[int, int]) -> list[tuple[str, int, int]]:
    """(version, end) pairs as a server reports them."""
    starts = [0, *(end for _, end in ends)]
    return [(OURS.of(V[version]), start, end) for (version, end), start in zip(ends, starts, strict=False)]


def test_labels_name_their_engine() -> None:
    label = OURS.of(PolicyVersion(2, 140))
    assert label == "headrace/run.1a/2.140"
    assert OURS.version(label) == PolicyVersion(2, 140)
    for other in ("default", "2.140", "headrace/run.1b/2.140", "headrace/run.1a/x", "run.1a/2.140", ""):
        assert OURS.version(other) is None
    assert OURS.strange("headrace/run.1b/2.140")
    assert not OURS.strange(label)
    assert not OURS.strange("default")
    assert not OURS.strange("checkpoints/step/7")


def test_kept_keys_and_values_are_said() -> None:
    assert segment_spans(9, V[1], report((1, 4), (2, 9)), OURS, "keep") == (
        VersionSpan(0, 4, V[1], "fresh"), VersionSpan(4, 9, V[2], "kept"),
    )  # fmt: skip


def test_recomputed_ones_are_fresh() -> None:
    assert segment_spans(9, V[1], report((1, 4), (2, 9)), OURS, "recompute") == (
        VersionSpan(0, 4, V[1], "fresh"), VersionSpan(4, 9, V[2], "fresh"),
    )  # fmt: skip


def test_a_prompt_may_come_from_an_older_versions_cache() -> None:
    """The request waited at the server while another version came."""
    kinds: tuple[tuple[Kv, str], ...] = (("keep", "kept"), ("recompute", "fresh"), ("resume", "fresh"))
    for kv, state in kinds:
        spans = segment_spans(5, V[1], report((2, 5)), OURS, kv)
        assert spans is not None
        assert [span.kv for span in spans] == [state]


def test_what_is_not_known_is_not_guessed() -> None:
    assert segment_spans(5, V[1], [("default", 0, 5)], OURS, "keep") is None
    assert segment_spans(5, V[1], report((1, 4)), OURS, "keep") is None
    assert segment_spans(5, V[1], [], OURS, "keep") is None
    assert segment_spans(5, V[1], [(OURS.of(V[1]), 1, 5)], OURS, "keep") is None
    assert segment_spans(0, V[1], report((1, 0)), OURS, "keep") == ()
    assert whole_segment(5, V[1], V[2]) is None
    assert whole_segment(5, V[1], None) is None
    assert whole_segment(5, V[1], V[1]) == (VersionSpan(0, 5, V[1], "fresh"),)
    assert whole_segment(0, V[1], V[1]) == ()


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)), min_size=1, max_size=5), MODES, st.integers(0, 20))
def test_spans_cover_their_tokens_without_gap(lengths: list[tuple[int, int]], kv: Kv, cut: int) -> None:
    ends, end = [], 0
    for version, length in lengths:
        end += length
        ends.append((version, end))
    spans = segment_spans(end, V[lengths[0][0]], report(*ends), OURS, kv)
    assert spans is not None
    twice = join_spans((spans, spans))
    shorter = cut_spans(twice, cut)
    for covered, count in ((spans, end), (twice, 2 * end), (shorter, min(cut, 2 * end))):
        assert [place for span in covered for place in range(span.start, span.end)] == list(range(count))
        assert all(one[2:] != other[2:] for one, other in pairwise(covered)) or covered is spans
    tokens = [version for version, length in lengths for _ in range(length)]
    said = [V.index(span.version) for span in spans for _ in range(span.start, span.end)]
    assert said == tokens
