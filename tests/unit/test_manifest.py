"""The manifest's own promises: what is laid out is sound, and what is read back is what was written or is refused."""

from __future__ import annotations

import random
from dataclasses import replace

import msgpack
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from broker.messages import SCHEMA
from headrace.errors import WeightError, WireError
from headrace.version import PolicyVersion
from weightsync.manifest import (
    ALIGNMENT,
    DIGEST_BYTES,
    DTYPE_BYTES,
    MAX_PARTS,
    MAX_TENSORS,
    Layout,
    Manifest,
    Part,
    TensorSpec,
    cut,
    decode,
    encode,
    layout_fault,
    manifest_fault,
)

shapes = st.lists(
    st.tuples(
        st.text(min_size=1, max_size=20),
        st.sampled_from(sorted(DTYPE_BYTES)),
        st.lists(st.integers(0, 9), max_size=4).map(tuple),
    ),
    min_size=1,
    max_size=12,
    unique_by=lambda item: item[0],
)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    layout = Layout.of(draw(shapes), draw(st.integers(1, 4)), ALIGNMENT * draw(st.integers(1, 64)))
    sealed, numbers = draw(st.booleans()), random.Random(draw(st.integers(0, 9)))

    def part(number: int) -> Part:
        digests = cut(numbers.randbytes(DIGEST_BYTES * layout.chunks(number))) if sealed else ()
        return Part(draw(st.text(max_size=30)), draw(st.text(max_size=30)), digests)

    return Manifest(
        version=PolicyVersion(draw(st.integers(0, 2**40)), draw(st.integers(0, 2**40))),
        layout=layout,
        parts=tuple(map(part, range(layout.parts))),
        sealed=sealed,
        run_id=draw(st.text(max_size=30)),
        sealed_s=draw(st.floats(allow_nan=False)),
    )


EXAMPLE = Manifest(
    version=PolicyVersion(2, 140),
    layout=Layout.of([("a.weight", "bfloat16", (4, 3)), ("a.bias", "float32", (5,))], chunk_bytes=64),
    parts=(Part("one", "segment", (b"0" * 16, b"1" * 16)),),
    sealed=True,
    run_id="run",
    sealed_s=1.5,
)


def enveloped(body: object, schema: object = SCHEMA) -> bytes:
    data = msgpack.packb(body)
    return msgpack.packb([schema, xxhash.xxh3_128_digest(data), data])


def body_with(index: int, value: object) -> bytes:
    """The example's bytes with one field of its body replaced, under a right digest."""
    body = msgpack.unpackb(msgpack.unpackb(encode(EXAMPLE))[2])
    body[index] = value
    return enveloped(body)


@given(shapes)
def test_tensors_lie_aligned_apart_and_in_order(items: list[tuple[str, str, tuple[int, ...]]]) -> None:
    layout = Layout.of(items)
    assert layout_fault(layout) is None
    assert [tensor.name for tensor in layout.tensors] == [name for name, _, _ in items]
    end = 0
    for tensor in layout.tensors:
        assert tensor.offset % ALIGNMENT == 0
        assert tensor.offset >= end
        end = tensor.offset + tensor.nbytes
    assert end <= layout.nbytes < end + ALIGNMENT


@given(manifests())
def test_decode_is_the_inverse_of_encode(manifest: Manifest) -> None:
    assert decode(encode(manifest)) == manifest


@given(manifests(), st.data())
def test_any_flipped_bit_is_refused(manifest: Manifest, data: st.DataObject) -> None:
    wire = bytearray(encode(manifest))
    wire[data.draw(st.integers(0, len(wire) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(WireError):
        decode(bytes(wire))


@given(manifests(), st.data())
def test_any_truncation_is_refused(manifest: Manifest, data: st.DataObject) -> None:
    wire = encode(manifest)
    with pytest.raises(WireError):
        decode(wire[: data.draw(st.integers(0, len(wire) - 1))])


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        decode(data)


values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**60) | st.floats() | st.text(max_size=5) | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=9),
    max_leaves=12,
)


@given(st.integers(0, 7), values)
def test_a_wrong_field_under_a_right_digest_is_refused_or_sound(index: int, value: object) -> None:
    try:
        manifest = decode(body_with(index, value))
    except WireError:
        return
    assert manifest_fault(manifest) is None
    assert decode(encode(manifest)) == manifest


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"offset": 64}, "starts at 64, not at 0"),
        ({"offset": -64}, "starts at -64, not at 0"),
        ({"nbytes": 25}, "25 bytes, which its shape does not make"),
        ({"dtype": "int8"}, "unknown dtype 'int8'"),
        ({"name": ""}, "a name of 0 characters"),
        ({"shape": (2,) * 9, "nbytes": 1024}, "beyond 8 dimensions"),
        ({"shape": (-3, -4)}, "with a size out of range"),
        ({"shape": (4, 30), "nbytes": 240}, "take 256 bytes, not 128"),
    ],
)
def test_unsound_tensor_is_named(change: dict[str, object], reason: str) -> None:
    first = replace(EXAMPLE.layout.tensors[0], **change)
    layout = Layout((first,), EXAMPLE.layout.nbytes)
    fault = layout_fault(layout)
    assert fault is not None
    assert reason in fault
    with pytest.raises(WeightError, match="not valid"):
        encode(replace(EXAMPLE, layout=layout))


def test_overlapping_scattered_and_repeated_tensors_are_refused() -> None:
    a, b = EXAMPLE.layout.tensors
    assert "starts at 0, not at 64" in str(layout_fault(Layout((a, replace(b, offset=0)), 128)))
    assert "starts at 128, not at 64" in str(layout_fault(Layout((a, replace(b, offset=128)), 192)))
    assert "take 128 bytes, not 192" in str(layout_fault(Layout((a, b), 192)))
    assert "appears twice" in str(layout_fault(Layout((a, replace(b, name=a.name)), 128)))


def test_another_schema_is_refused_by_number() -> None:
    with pytest.raises(WireError, match=f"schema {SCHEMA + 1}, this process speaks {SCHEMA}"):
        decode(enveloped([], SCHEMA + 1))


@pytest.mark.parametrize(
    ("index", "value", "reason"),
    [
        (1, [-1, 0], "negative"),
        (6, [], "0 tensors"),
        (7, [["h", "s", b"short"]], "5 bytes, not a multiple of 16"),
        (7, [["h", "s", b"0" * 16]], "1 digests for the 2 chunks of part 0"),
        (7, [["h", "s", b"0" * 16]] * 2, "1 digests for the 2 chunks of part 0"),
        (7, [], "0 parts, not 1 to"),
        (7, [["h", "s" * 600, b"0" * 32]], "longer than 512"),
        (7, [["h", "s"]], "part in the manifest is not made of"),
        (2, False, "2 digests for the 0 chunks of part 0"),
        (4, 1 << 60, "bytes, not 0 to"),
        (5, 96, "chunks of 96 bytes, not a multiple of 64"),
        (5, 0, "chunks of 0 bytes"),
        (5, 1 << 40, "chunks of 1099511627776 bytes"),
        (0, "h" * 600, "longer than 512"),
        (2, 1, "not made of"),
    ],
)
def test_wrong_field_is_refused_with_its_reason(index: int, value: object, reason: str) -> None:
    with pytest.raises(WireError, match=reason):
        decode(body_with(index, value))


def test_lengths_that_promise_too_much_are_refused_before_they_are_allocated() -> None:
    huge_array = b"\xdd" + (2**32 - 1).to_bytes(4, "big")
    with pytest.raises(WireError):
        decode(huge_array)
    with pytest.raises(WireError):
        decode(body_with(6, [[]] * (MAX_TENSORS + 1)))
    with pytest.raises(WireError, match="more than 4096 parts"):
        decode(body_with(7, [[]] * (MAX_PARTS + 1)))


@pytest.mark.parametrize(
    ("shapes_", "sentence"),
    [
        ([("w", "int8", (1,))], "'w' has dtype 'int8'"),
        ([("w", "float32", (1,)), ("w", "float32", (1,))], "appears twice"),
        ([], "0 tensors"),
    ],
)
def test_models_that_cannot_be_laid_out_are_named(
    shapes_: list[tuple[str, str, tuple[int, ...]]], sentence: str
) -> None:
    with pytest.raises(WeightError, match=sentence):
        Layout.of(shapes_)


def test_scalar_tensor_takes_one_element() -> None:
    assert Layout.of([("scale", "float32", ())]).tensors == (TensorSpec("scale", "float32", (), 0, 4),)
