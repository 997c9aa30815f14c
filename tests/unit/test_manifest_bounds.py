"""Manifests at their bounds: as much as may stand there is taken, a little more is named."""

from __future__ import annotations

from dataclasses import replace

import msgpack
import pytest
import xxhash

from broker.messages import SCHEMA
from headrace.errors import WireError
from headrace.version import PolicyVersion
from weightsync.manifest import (
    MAX_CHUNK_BYTES,
    MAX_DIMS,
    MAX_PARTS,
    MAX_TENSORS,
    Layout,
    Manifest,
    Part,
    decode,
    encode,
    layout_fault,
)

SHAPE = (1,) * MAX_DIMS
EXAMPLE = Manifest(
    version=PolicyVersion(2, 140),
    layout=Layout.of([("a", "float32", SHAPE)]),
    parts=(Part("one", "segment", (b"0" * 16,)),),
    sealed=True,
    run_id="run",
    sealed_s=1.5,
)
ROWS = 6


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


def test_more_tensors_than_there_may_be_are_refused() -> None:
    with pytest.raises(WireError, match=f"more than {MAX_TENSORS} tensors|not valid msgpack"):
        decode(body_with(ROWS, [0] * (MAX_TENSORS + 1)))


def test_as_many_parts_and_as_large_chunks_as_there_may_be_are_taken() -> None:
    layout = Layout.of([("a", "float32", (3,))], MAX_PARTS, MAX_CHUNK_BYTES)
    begun = replace(EXAMPLE, layout=layout, parts=(Part("h", "s"),) * MAX_PARTS, sealed=False)
    assert decode(encode(begun)) == begun
    for wrong in ({"parts": MAX_PARTS + 1}, {"chunk_bytes": MAX_CHUNK_BYTES + 64}, {"chunk_bytes": 0}, {"parts": 0}):
        assert layout_fault(replace(layout, **wrong)) is not None
