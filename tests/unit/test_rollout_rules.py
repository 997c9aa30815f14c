"""What becomes of a group when members fail, and of the tokens of a transcript: pure decisions."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from broker.messages import Task, TaskDelivery, VersionSpan
from broker.validate import Limits, check_group
from headrace.version import PolicyVersion
from producers.engines.api import Completion
from producers.group import assemble, failed_group
from producers.in_play import Member
from producers.transcript import Transcript

FIRST = PolicyVersion(1, 0)
TASK = Task("t1", "train", "chatty", 5, 77, 4, FIRST, 0)


@given(
    good=st.integers(0, 6),
    failed=st.integers(0, 6),
    needed=st.integers(1, 6),
    kind=st.sampled_from(["train", "eval"]),
)
def test_the_rule_for_failed_members(good: int, failed: int, needed: int, kind: str) -> None:
    size = good + failed
    if not size:
        return
    transcript = Transcript()
    transcript.observe(np.array([1], np.int32))
    spans = (VersionSpan(0, 1, FIRST),)
    transcript.complete(Completion("r", np.array([2], np.int32), np.array([-1.0], np.float32), spans, "stop", 0, 0))
    trajectory = transcript.trajectory(1.0, "stop")
    members = [Member(trajectory)] * good + [Member(None, "no")] * failed
    delivery = TaskDelivery("1-0", 1, replace(TASK, kind=kind, group_size=size))
    group = assemble(delivery, "p1", members, needed)
    enough = good >= (1 if kind == "eval" else min(needed, size))
    assert len(group.trajectories) == (good if enough else 0)
    assert group.failures == ("no",) * failed
    assert bool(group.error) is not enough
    assert check_group(group, Limits(256, {"train": size, "eval": size})) is None
    assert check_group(failed_group(delivery, "p1", "gone"), Limits(256, {})) is None


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5), st.integers(0, 2)), min_size=1, max_size=8))
def test_transcripts_keep_every_token_in_its_place(parts: list[tuple[bool, int, int]]) -> None:
    transcript, tokens, versions = Transcript(), list[int](), list[int | None]()
    for sampled, count, step in parts:
        ids = np.arange(len(tokens), len(tokens) + count, dtype=np.int32)
        tokens += ids.tolist()
        versions += [step if sampled else None] * count
        if sampled:
            spans = (VersionSpan(0, count, PolicyVersion(1, step)),)
            transcript.complete(Completion("r", ids, -1.0 - ids.astype(np.float32), spans, "stop", 0.0, 0.0))
        else:
            transcript.observe(ids)
    trajectory = transcript.trajectory(0.0, "stop")
    assert trajectory.token_ids_T.tolist() == tokens
    assert trajectory.loss_mask_T.tolist() == [version is not None for version in versions]
    assert trajectory.logprobs_T.tolist() == [
        0.0 if version is None else -1.0 - token for token, version in zip(tokens, versions, strict=True)
    ]
    shown: list[int | None] = [None] * len(tokens)
    for span in trajectory.spans:
        shown[span.start : span.end] = [span.version.step] * (span.end - span.start)
    assert shown == versions
    assert all(a.end < b.start or a.version != b.version for a, b in pairwise(trajectory.spans))
