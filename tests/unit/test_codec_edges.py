"""What a group is beside its tokens, the types that arrive, and fields of few numbers that are cut short."""

from __future__ import annotations

from dataclasses import replace

import msgpack
import numpy as np
import pytest

from broker.codec import decode_group, decode_groups, encode_group
from broker.messages import Group
from broker.validate import Limits
from headrace.errors import WireError
from tests.support import make_group, make_task

LIMITS = Limits(100, {})


def test_a_stopped_group_says_so_on_the_other_side() -> None:
    stopped = Group(
        "t", 2, "train", "sums", 5, "p", (), ("a", "b"), outcome="stale", error="too old", stopped_N=(7, 12)
    )
    arrived = decode_group(encode_group(stopped, 100), LIMITS)
    assert (arrived.outcome, arrived.error, arrived.stopped_N) == ("stale", "too old", (7, 12))


@pytest.mark.parametrize("scattered", [False, True])
def test_arrays_arrive_in_the_types_that_the_trainer_takes(scattered: bool) -> None:
    group = make_group(make_task("a"), 1, "p0")
    if scattered:
        members = [
            replace(one, loss_mask_T=one.loss_mask_T & (np.arange(one.token_ids_T.size) % 2 == 0))
            for one in group.trajectories
        ]
        group = replace(
            group,
            trajectories=tuple(replace(one, logprobs_T=one.logprobs_T * one.loss_mask_T) for one in members),
        )
    for member in decode_group(encode_group(group, 100), LIMITS).trajectories:
        types = (member.token_ids_T.dtype, member.logprobs_T.dtype, member.loss_mask_T.dtype)
        assert types == (np.int32, np.float32, np.bool_)


@pytest.mark.parametrize(("field", "size"), [("lengths", 4), ("mask", 4), ("spans", 4), ("rewards", 8)])
def test_few_numbers_that_are_cut_short_are_named(field: str, size: int) -> None:
    schema, fields = msgpack.unpackb(encode_group(make_group(make_task("a"), 1, "p0"), 100))
    fields[field] = fields[field][:-1]
    cut = len(fields[field])
    with pytest.raises(WireError, match=f"field '{field}' has {cut} bytes, which is no multiple of {size}"):
        decode_group(msgpack.packb([schema, fields]), LIMITS)


def test_each_body_has_its_own_group_or_reason() -> None:
    bodies = [encode_group(make_group(make_task(name), 1, "p0", seed=seed), 100) for seed, name in enumerate("abc")]
    first, junk, second, third = decode_groups([bodies[0], b"\xc1", *bodies[1:]], LIMITS)
    assert [one.task_id for one in (first, second, third) if isinstance(one, Group)] == ["a", "b", "c"]
    assert isinstance(junk, WireError)
    assert str(junk) == "group: the body is not msgpack"
    few = Limits(1, {})
    assert ["outside the vocabulary of 1" in str(one) for one in decode_groups(bodies, few)] == [True] * 3
