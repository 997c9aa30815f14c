"""The wire: what goes in comes out, in few bytes; what is not a message is refused with a reason."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.codec import (
    MAX_FEW,
    decode_flat,
    decode_group,
    decode_step,
    decode_task,
    encode_group,
    encode_step,
    encode_task,
)
from broker.flat import mask_of, runs_of, sampled_before
from broker.messages import SCHEMA, Group, StepEntry, StepRecord, Task, Trajectory, VersionSpan
from broker.validate import Limits
from headrace.errors import WireError
from headrace.version import PolicyVersion
from tests.support import make_group, make_task, make_trajectory

LIMITS = Limits(100, {"train": 8})
TEXT = st.text(st.characters(codec="utf-8"), max_size=20)


@st.composite
def trajectories(draw: st.DrawFn, vocab: int) -> Trajectory:
    mask = np.array(draw(st.lists(st.booleans(), min_size=1, max_size=40).filter(any)))
    tokens = len(mask)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    cuts = sorted(draw(st.sets(st.integers(1, tokens - 1), max_size=4)) if tokens > 1 else ())
    bounds = [0, *cuts, tokens]
    spans = tuple(
        VersionSpan(start, end, PolicyVersion(1, number), draw(st.sampled_from(["kept", "fresh"])))
        for number, (start, end) in enumerate(pairwise(bounds))
    )
    return Trajectory(
        token_ids_T=rng.integers(0, vocab, tokens, dtype=np.int32),
        logprobs_T=np.where(mask, -rng.random(tokens) * 20, 0).astype(np.float32),
        loss_mask_T=mask,
        spans=spans,
        reward=draw(st.floats(-1e9, 1e9)),
        finish_reason=draw(st.sampled_from(["stop", "length", "abort"])),
        correct=draw(st.sampled_from([True, False, None])),
    )


@st.composite
def groups(draw: st.DrawFn) -> tuple[Group, int]:
    vocab = draw(st.sampled_from([2, 256, 257, 65_536, 65_537, 200_000]))
    members = draw(st.lists(trajectories(vocab), max_size=4))
    group = Group(
        task_id=draw(TEXT),
        attempt=draw(st.integers(1, 100)),
        kind=draw(st.sampled_from(["train", "eval"])),
        environment=draw(TEXT),
        index=draw(st.integers(0, 2**40)),
        producer=draw(TEXT),
        trajectories=tuple(members),
        failures=tuple(draw(st.lists(TEXT, max_size=3))),
        outcome="played" if members else "failed",
        error="" if members else "all members failed",
        seconds={"decode": draw(st.floats(0, 100))},
    )
    return group, vocab


def same(one: Group, other: Group) -> bool:
    arrays = all(
        np.array_equal(a.token_ids_T, b.token_ids_T)
        and np.array_equal(a.logprobs_T, b.logprobs_T)
        and np.array_equal(a.loss_mask_T, b.loss_mask_T)
        and (a.spans, a.reward, a.finish_reason, a.correct) == (b.spans, b.reward, b.finish_reason, b.correct)
        for a, b in zip(one.trajectories, other.trajectories, strict=True)
    )
    names = ("task_id", "attempt", "kind", "environment", "index", "producer", "failures", "error", "seconds")
    return arrays and all(getattr(one, name) == getattr(other, name) for name in names)


@given(groups())
def test_a_group_comes_out_as_it_went_in(given_group: tuple[Group, int]) -> None:
    group, vocab = given_group
    assert same(decode_group(encode_group(group, vocab), Limits(vocab, {})), group)


NUMBER = st.integers(0, 2**62)
TASKS = st.builds(
    Task,
    task_id=TEXT,
    kind=st.sampled_from(["train", "eval"]),
    environment=TEXT,
    index=NUMBER,
    seed=NUMBER,
    group_size=NUMBER,
    min_version=st.builds(PolicyVersion, NUMBER, NUMBER),
    deadline_ms=NUMBER,
    admitted_step=NUMBER,
)


@given(TASKS)
def test_a_task_comes_out_as_it_went_in(task: Task) -> None:
    assert decode_task(encode_task(task)) == task


@given(
    st.lists(st.builds(StepEntry, TEXT, TEXT, st.sampled_from(["trained", "stale", "lost"]), TEXT), max_size=5),
    st.none() | st.builds(PolicyVersion, NUMBER, NUMBER),
)
def test_a_step_record_comes_out_as_it_went_in(entries: list[StepEntry], restored: PolicyVersion | None) -> None:
    record = StepRecord(PolicyVersion(3, 140), tuple(entries), restored)
    assert decode_step(encode_step(record)) == record


def test_a_step_record_without_a_rollback_has_no_field_for_it() -> None:
    """So a log that was written before there was one reads as before."""
    body = msgpack.packb([2, {"version": [3, 140], "entries": [["7-0", "a", "trained", ""]]}])
    record = StepRecord(PolicyVersion(3, 140), (StepEntry("7-0", "a", "trained"),))
    assert encode_step(record) == body
    assert decode_step(body) == record


@given(st.lists(st.booleans(), max_size=60))
def test_masks_and_runs_are_inverse(mask: list[bool]) -> None:
    runs = runs_of(np.array(mask, np.bool_))
    assert mask_of(runs).tolist() == mask
    assert all(run > 0 for run in runs[1:-1])
    assert len(runs) % 2 == 0
    if mask:
        positions = range(len(mask) + 1)
        assert sampled_before(runs, positions) == [sum(mask[:place]) for place in positions]


@pytest.mark.parametrize(("vocab", "most"), [(200, 6), (49_152, 7), (65_536, 7), (151_936, 9)])
def test_few_bytes_per_token(vocab: int, most: int) -> None:
    rng = np.random.default_rng(0)
    members = tuple(make_trajectory(rng, prompt=64, sampled=960, vocab=vocab) for _ in range(8))
    group = replace(make_group(make_task("a", group_size=1), 1, "producer-0"), trajectories=members)
    assert len(encode_group(group, vocab)) / (8 * 1024) <= most


def test_arrays_of_unequal_length_do_not_leave_the_producer() -> None:
    group = make_group(make_task("a"), 1, "p0")
    broken = replace(group.trajectories[0], loss_mask_T=np.ones(3, np.bool_))
    with pytest.raises(WireError, match="trajectory 1 has 10 token ids, 10 log-probs and a loss mask of 3"):
        encode_group(replace(group, trajectories=(group.trajectories[0], broken)), 100)


@pytest.mark.parametrize("vocab_id", [-1, 300, 70_000])
def test_an_id_outside_the_vocabulary_arrives_as_it_is(vocab_id: int) -> None:
    group = make_group(make_task("a"), 1, "p0")
    ids = group.trajectories[1].token_ids_T.copy()
    ids[2] = vocab_id
    group = replace(group, trajectories=(group.trajectories[0], replace(group.trajectories[1], token_ids_T=ids)))
    assert decode_flat(encode_group(group, 100)).token_ids_T[12] == vocab_id
    with pytest.raises(WireError, match=f"token id {vocab_id} is outside the vocabulary of 100"):
        decode_group(encode_group(group, 100), LIMITS)


def body_with(**changes: object) -> bytes:
    schema, fields = msgpack.unpackb(encode_group(make_group(make_task("a"), 1, "p0"), 100))
    fields.update(changes)
    return msgpack.packb([schema, {name: value for name, value in fields.items() if value is not ...}])


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "not msgpack"),
        (b"\xc1", "not msgpack"),
        (b"\xa4\xff\xff\xff\xff", r"not \[schema, fields\]"),
        (b"\x91" * 5000, "not msgpack"),
        (b"\xdd\xff\xff\xff\xff", "not msgpack"),
        (b"\x92\xa4\xff\xff\xff\xff\x80", "not msgpack"),
        (b"\x92\x02\xdf\xff\xff\xff\xff", "not msgpack"),
        (msgpack.packb(7), r"not \[schema, fields\]"),
        (msgpack.packb([SCHEMA]), r"not \[schema, fields\]"),
        (msgpack.packb([SCHEMA + 1, {}]), f"schema {SCHEMA + 1}, but this process speaks {SCHEMA}"),
        (msgpack.packb([SCHEMA, []]), "Expected object, got array"),
        (msgpack.packb([SCHEMA, {1: 2}]), "Expected str"),
        (msgpack.packb([True, {}]), "schema True"),
        (msgpack.packb([SCHEMA, {}]) + b"\0", "not msgpack"),
        (body_with(task=3), r"Expected str, got int - at \$\[1\].task"),
        (body_with(ids=...), "missing required field ids"),
        (body_with(ids="text"), r"Expected bytes, got str - at \$\[1\].ids"),
        (body_with(dtype="O"), "Invalid enum value 'O'"),
        (body_with(kind="test"), "Invalid enum value 'test'"),
        (body_with(attempt=True), "Expected int, got bool"),
        (body_with(attempt=2.0), "Expected int, got float"),
        (body_with(outcome="dead"), "Invalid enum value 'dead'"),
        (body_with(failures=[1]), r"Expected str, got int - at \$\[1\].failures\[0\]"),
        (body_with(seconds={"decode": "long"}), r"Expected float, got str - at \$\[1\].seconds"),
        (body_with(seconds={"decode": float("nan")}), "no finite number"),
        (body_with(seconds={b"decode": 1.0}), "Expected str, got bytes"),
        (body_with(seconds={"decode": True}), "Expected float, got bool"),
        (body_with(stopped=[1.0]), "Expected int, got float"),
        (body_with(mask=b"\0" * 4 * (MAX_FEW + 1)), "field 'mask' holds 1048577 numbers, more than 1048576"),
        (body_with(logprobs=b"12345"), "field 'logprobs' has 5 bytes, which is no multiple of 4"),
        (body_with(spans=b"\0" * 24), "field 'spans' holds 6 numbers"),
    ],
)
def test_what_is_no_group_is_refused_with_a_reason(body: bytes, says: str) -> None:
    with pytest.raises(WireError, match=says):
        decode_group(body, LIMITS)


@given(st.binary(max_size=200))
def test_no_bytes_surprise_the_decoders(body: bytes) -> None:
    for decode in (decode_flat, decode_task, decode_step):
        with pytest.raises(WireError):
            decode(body)


@given(st.integers(0, 2**31), st.integers(0, 255), st.integers(0, 7))
def test_a_flipped_byte_is_refused_or_a_sound_group(place: int, byte: int, member: int) -> None:
    body = bytearray(encode_group(make_group(make_task("a"), 1, "p0", seed=member), 100))
    body[place % len(body)] = byte
    try:
        group = decode_group(bytes(body), LIMITS)
    except WireError:
        return
    assert same(decode_group(encode_group(group, 100), LIMITS), group)


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ([["1-0", "a", "trained"]], "Expected array of length 4, got 3"),
        ([["1-0", "a", "eaten", ""]], "Invalid enum value 'eaten'"),
        ([3], "Expected array, got int"),
    ],
)
def test_a_step_record_with_nonsense_is_refused(entries: list[object], says: str) -> None:
    with pytest.raises(WireError, match=says):
        decode_step(msgpack.packb([SCHEMA, {"version": [1, 2], "entries": entries}]))
    with pytest.raises(WireError, match=r"Expected array of length 2, got 1 - at \$\[1\].version"):
        decode_step(msgpack.packb([SCHEMA, {"version": [1], "entries": []}]))
