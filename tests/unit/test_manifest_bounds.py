"""Manifests at their bounds: as much as may stand there is taken, a little more is named."""

from __future__ import annotations

import msgpack
import pytest
import xxhash

from broker.messages import SCHEMA
from headrace.errors import WireError
from headrace.version import PolicyVersion
from weightsync.manifest import MAX_DIMS, MAX_TENSORS, Layout, Manifest, decode, encode

SHAPE = (1,) * MAX_DIMS
EXAMPLE = Manifest(
    version=PolicyVersion(2, 140),
    layout=Layout.of([("a", "float32", SHAPE)]),
    digests=("00" * 16,),
    host="one",
    segment="segment",
    sealed=True,
    run_id="run",
    sealed_s=1.5,
)
ROWS, DIGESTS = 7, 8


def body_with(index: int, value: object) -> bytes:
    """The example's bytes with one field of its body replaced, under a right digest."""
    body = msgpack.unpackb(msgpack.unpackb(encode(EXAMPLE))[2])
    body[index] = value
    data = msgpack.packb(body)
    return msgpack.packb([SCHEMA, xxhash.xxh3_128_digest(data), data])


def row_with(shape: list[object]) -> list[object]:
    (row,) = msgpack.unpackb(msgpack.unpackb(encode(EXAMPLE))[2])[ROWS]
    return [*row[:2], shape, *row[3:]]


def test_a_tensor_of_most_dimensions_is_taken() -> None:
    assert decode(encode(EXAMPLE)).layout.tensors[0].shape == SHAPE


@pytest.mark.parametrize("shape", [[*SHAPE, 1], ["1"], [1.0], [True]])
def test_a_shape_that_is_none_is_named(shape: list[object]) -> None:
    with pytest.raises(WireError, match=f"the shape of tensor 'a' is not a list of at most {MAX_DIMS} numbers"):
        decode(body_with(ROWS, [row_with(shape)]))


@pytest.mark.parametrize("index", [ROWS, DIGESTS])
def test_more_tensors_than_there_may_be_are_refused(index: int) -> None:
    with pytest.raises(WireError, match=f"more than {MAX_TENSORS} tensors|not valid msgpack"):
        decode(body_with(index, [0] * (MAX_TENSORS + 1)))


def test_a_digest_that_is_no_bytes_is_named() -> None:
    with pytest.raises(WireError, match="manifest has a digest that is not bytes"):
        decode(body_with(DIGESTS, ["0" * 16]))
