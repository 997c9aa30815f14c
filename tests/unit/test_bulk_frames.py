"""Requests and headers: what is written is read again, and nothing else is believed."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import WireError
from headrace.version import PolicyVersion
from weightsync.bulk.frames import (
    HEADER_BYTES,
    LENGTH,
    MAX_FAILED,
    MAX_REQUEST_BYTES,
    Ask,
    Change,
    Codec,
    Done,
    Get,
    Header,
    Status,
    decode_header,
    decode_parents,
    decode_request,
    encode_header,
    encode_parents,
    encode_request,
    header_fault,
)
from weightsync.manifest import MAX_CHUNK_BYTES, MAX_LAYOUT_BYTES, MAX_PARTS, MAX_TEXT

VERSION = PolicyVersion(2, 9)
GET = ["get", 2, 9, 0, 1000, 64, 0, 16, []]

versions = st.builds(PolicyVersion, st.integers(0, 1 << 62), st.integers(0, 1 << 62))
texts = st.text(max_size=40)
asks = st.builds(
    Ask, versions, st.integers(0, MAX_PARTS), texts, texts, texts, st.lists(texts, max_size=MAX_FAILED).map(tuple)
)
dones = st.builds(Done, versions, st.integers(0, MAX_PARTS), texts, st.booleans())


@st.composite
def gets(draw: st.DrawFn) -> Get:
    chunk_bytes = draw(st.integers(64, MAX_CHUNK_BYTES))
    nbytes = draw(st.integers(1, MAX_LAYOUT_BYTES))
    chunks = -(-nbytes // chunk_bytes)
    first = draw(st.integers(0, chunks - 1))
    codecs = st.sampled_from([codec for codec in Codec if codec is not Codec.RAW])
    change = draw(st.none() | st.builds(Change, versions, codecs, st.binary(max_size=40)))
    part = draw(st.integers(0, MAX_PARTS))
    return Get(draw(versions), part, nbytes, chunk_bytes, first, draw(st.integers(first + 1, chunks)), change)


@given(gets() | asks | dones)
def test_a_request_is_read_as_it_was_written(request_: Get | Ask | Done) -> None:
    data = encode_request(request_)
    (nbytes,) = LENGTH.unpack(data[: LENGTH.size])
    assert nbytes == len(data) - LENGTH.size <= MAX_REQUEST_BYTES
    assert decode_request(data[LENGTH.size :]) == request_


@given(st.binary(max_size=200))
def test_bytes_are_a_request_or_refused(data: bytes) -> None:
    try:
        request = decode_request(data)
    except WireError:
        return
    assert decode_request(encode_request(request)[LENGTH.size :]) == request


@pytest.mark.parametrize(
    "row",
    [
        [],
        ["fetch", 2, 9],
        [7],
        {"get": 1},
        ["get", 2, 9, 0, 1000, 64, 0, 17, []],
        ["get", 2, 9, 0, 1000, 64, 5, 5, []],
        ["get", 2, 9, 0, 1000, 64, -1, 5, []],
        ["get", 2, 9, 0, 1000, 63, 0, 5, []],
        ["get", 2, 9, 0, 1000, MAX_CHUNK_BYTES + 1, 0, 1, []],
        ["get", 2, 9, 0, MAX_LAYOUT_BYTES + 1, 64, 0, 1, []],
        ["get", 2, 9, MAX_PARTS + 1, 1000, 64, 0, 1, []],
        ["get", -1, 9, 0, 1000, 64, 0, 1, []],
        ["get", 2, (1 << 62) + 1, 0, 1000, 64, 0, 1, []],
        ["get", 2, 9, 0, 1000, 64, 0, 1, [1]],
        ["get", 2, 9, 0, 1000, 64, 0, 1, [1, -1, 1, b""]],
        ["get", 2, 9, 0, 1000, 64, 0, 1, [1, 1, 0, b""]],
        ["get", 2, 9, 0, 1000, 64, 0, 1, [1, 1, 3, b""]],
        ["get", 2, 9, 0, 1000, 64, 0, 1, [1, 1, 1, ""]],
        ["get", 2, 9, 0, 1000, 64, 0, True, []],
        ["get", 2, 9.0, 0, 1000, 64, 0, 1, []],
        ["ask", 2, 9, 0, "n" * (MAX_TEXT + 1), "", "", []],
        ["ask", 2, 9, 0, "n", "", "", [7]],
        ["ask", 2, 9, 0, "n", "", "", ["a"] * (MAX_FAILED + 1)],
        ["ask", 2, 9, 0, b"n", "", "", []],
        ["done", 2, 9, 0, "n", 1],
        ["done", 2, 9, 0, "n"],
    ],
)
def test_a_request_out_of_bounds_is_refused(row: object) -> None:
    assert decode_request(msgpack.packb(GET))
    with pytest.raises(WireError):
        decode_request(msgpack.packb(row))


def test_a_request_that_is_too_long_is_refused() -> None:
    with pytest.raises(WireError, match="over the bound"):
        decode_request(bytes(MAX_REQUEST_BYTES + 1))


headers = st.builds(
    Header,
    st.sampled_from(Status),
    st.sampled_from(Codec),
    st.integers(0, (1 << 32) - 1),
    st.integers(0, (1 << 32) - 1),
    st.integers(0, (1 << 32) - 1),
    st.binary(min_size=16, max_size=16),
    st.binary(min_size=16, max_size=16),
    st.integers(0, (1 << 32) - 1),
)


@given(headers)
def test_a_header_is_read_as_it_was_written(header: Header) -> None:
    data = encode_header(header)
    assert len(data) == HEADER_BYTES
    assert decode_header(data) == header


@given(headers, st.integers(0, HEADER_BYTES - 1), st.integers(1, 255))
def test_any_changed_byte_of_a_header_is_noticed(header: Header, at: int, change: int) -> None:
    data = bytearray(encode_header(header))
    data[at] ^= change
    with pytest.raises(WireError):
        decode_header(bytes(data))


CHANGE = Change(VERSION, Codec.SPARSE_ULP, b"")


@pytest.mark.parametrize(
    ("header", "change"),
    [
        (Header(Status.CHUNK, Codec.RAW, 4, 100, 100), CHANGE),
        (Header(Status.CHUNK, Codec.RAW, 3, 101, 101), CHANGE),
        (Header(Status.CHUNK, Codec.RAW, 3, 99, 100), CHANGE),
        (Header(Status.CHUNK, Codec.SPARSE_ULP, 3, 100, 100), CHANGE),
        (Header(Status.CHUNK, Codec.SPARSE_ULP, 3, 50, 99), CHANGE),
        (Header(Status.CHUNK, Codec.SPARSE_ABS, 3, 50, 100), CHANGE),
        (Header(Status.CHUNK, Codec.SPARSE_ULP, 3, 50, 100), None),
    ],
)
def test_a_header_that_does_not_fit_what_was_asked_is_refused(header: Header, change: Change | None) -> None:
    assert header_fault(Header(Status.CHUNK, Codec.RAW, 3, 100, 100), 3, 100, change) is None
    assert header_fault(Header(Status.CHUNK, Codec.SPARSE_ULP, 3, 99, 100), 3, 100, CHANGE) is None
    assert header_fault(header, 3, 100, change)


def test_parents_are_read_as_they_were_written_and_bounded() -> None:
    assert decode_parents(encode_parents(["a:1", "b:2"])) == ["a:1", "b:2"]
    for value in (["a"] * 4, [7], {}, "a:1", ["n" * (MAX_TEXT + 1)]):
        with pytest.raises(WireError):
            decode_parents(msgpack.packb(value))
    with pytest.raises(WireError):
        decode_parents(b"\xc1")
