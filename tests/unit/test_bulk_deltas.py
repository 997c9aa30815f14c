"""Deltas of chunks: what is made out of base and delta is the new version, bit by bit, and each is made once."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import WireError
from headrace.version import PolicyVersion
from tests.bulk import changed, content
from weightsync.bulk.deltas import (
    MAX_RUNS,
    Delta,
    DeltaCache,
    Key,
    apply_chunk,
    apply_to,
    decode_runs,
    encode_chunk,
    runs_between,
    runs_of,
)
from weightsync.bulk.frames import Codec
from weightsync.manifest import Layout
from weightsync.placement import Bytes, chunk_bounds

VERSION = PolicyVersion(1, 2)
SHAPES = [
    ("a", "bfloat16", (64, 40)), ("b", "float32", (333,)), ("c", "float32", (5,)), ("d", "float16", (50, 7)),
    ("e", "bfloat16", (3,)),
]  # fmt: skip


@pytest.mark.parametrize(
    "data",
    [
        b"12345678",
        b"\1" + bytes(8),
        bytes(9) + bytes(9),
        bytes(8) + b"\3",
        b"".join(n.to_bytes(8, "little") + b"\0" for n in range(MAX_RUNS + 1)),
        b"",
    ],
)
def test_runs_that_are_none_are_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        decode_runs(data)


@given(st.integers(0, 1 << 30), st.sampled_from([Codec.SPARSE_ULP, Codec.SPARSE_ABS]), st.floats(0, 1))
def test_base_and_delta_make_the_new_version_bit_by_bit(seed: int, codec: Codec, share: float) -> None:
    layout = Layout.of(SHAPES, chunk_bytes=1024)
    old = content(layout, seed)
    new = changed(old, share, seed)
    marks = decode_runs(runs_of(layout, 0))
    for first, last in chunk_bounds(layout, 0):
        wire = encode_chunk(codec, old[first:last], new[first:last], runs_between(marks, first, last))
        out = old[first:last].copy()
        apply_chunk(codec, memoryview(wire), out, runs_between(marks, first, last))
        assert np.array_equal(out, new[first:last])


class Given:
    """A base in an array."""

    version = VERSION

    def __init__(self, data: Bytes) -> None:
        self._data = data

    def read(self, part: int, chunk: int, views: list[memoryview]) -> None:
        at = 0
        for view in views:
            view[:] = self._data[at : at + len(view)].data
            at += len(view)


def test_a_chunk_in_several_places_is_changed_as_one_in_one_place() -> None:
    old = content(Layout.of([("a", "bfloat16", (512,))]), 1)
    new = changed(old, 0.1, 1)
    wire = memoryview(encode_chunk(Codec.SPARSE_ULP, old, new, iter([(0, 1024, "bfloat16")])))
    for cuts in ([1024], [3, 500, 521]):
        out = [memoryview(bytearray(cut)) for cut in cuts]
        apply_to(Given(old), 0, 0, Codec.SPARSE_ULP, wire, iter([(0, 1024, "bfloat16")]), out)
        assert b"".join(out) == new.tobytes()


@pytest.mark.parametrize("cut", [0, 3, 4, 20, -1])
def test_a_delta_that_is_cut_or_goes_on_is_refused(cut: int) -> None:
    old = content(Layout.of([("a", "bfloat16", (512,))]), 1)
    wire = encode_chunk(Codec.SPARSE_ULP, old, changed(old, 0.1, 1), iter([(0, 1024, "bfloat16")]))
    with pytest.raises(WireError):
        apply_chunk(Codec.SPARSE_ULP, memoryview(wire[:cut]), old.copy(), iter([(0, 1024, "bfloat16")]))
    with pytest.raises(WireError):
        apply_chunk(Codec.SPARSE_ULP, memoryview(wire + b"x"), old.copy(), iter([(0, 1024, "bfloat16")]))


def key(chunk: int) -> Key:
    return Key(VERSION, PolicyVersion(1, 1), 0, chunk, Codec.SPARSE_ULP, b"")


def test_a_delta_that_many_want_is_made_once() -> None:
    cache, made, go = DeltaCache(1 << 20), [], threading.Event()

    def make() -> bytes:
        made.append(1)
        go.wait(60)
        return b"delta"

    got: list[Delta] = []
    threads = [threading.Thread(target=lambda: got.append(cache.get(key(1), make))) for _ in range(8)]
    for thread in threads:
        thread.start()
    go.set()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert {(delta.wire, delta.digest) for delta in got} == {(b"delta", got[0].digest)}
    assert cache.get(key(1), make).encode_s == 0.0
    assert sum(delta.encode_s > 0 for delta in got) == 1, "who made it says what it took"


def test_a_delta_that_could_not_be_made_is_tried_again() -> None:
    cache = DeltaCache(1 << 20)

    def fails() -> bytes:
        raise WireError("no")

    with pytest.raises(WireError):
        cache.get(key(1), fails)
    assert cache.get(key(1), lambda: b"delta").wire == b"delta"


def test_kept_deltas_are_bounded_and_the_oldest_goes_first() -> None:
    cache = DeltaCache(10)
    for chunk in range(4):
        cache.get(key(chunk), lambda: b"1234")
    again: list[int] = []
    for chunk in range(3, -1, -1):
        cache.get(key(chunk), lambda chunk=chunk: again.append(chunk) or b"1234")
    assert again == [1, 0]
    assert cache.get(key(9), lambda: bytes(11)).wire == bytes(11), "one that is never kept"
