"""Chunks as the difference from a base that both ends have whole: made by the server, applied by who asked.

A chunk may hold elements of several dtypes. Each run of one dtype is encoded by itself and lies behind its length
(u32). Who asks says where the runs of the part begin, so that a server needs to know nothing of the model.
"""

from __future__ import annotations

import itertools
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from headrace.errors import WireError
from headrace.version import PolicyVersion
from weightsync import codecs
from weightsync.bulk.frames import Change, Codec, Get
from weightsync.bulk.shelf import Held
from weightsync.digests import digest_of
from weightsync.manifest import DTYPE_BYTES, Layout
from weightsync.placement import Bytes, places
from weightsync.transports.api import Base

MAX_RUNS = 4096
"""A part with more of them comes as full chunks."""

_RUN = struct.Struct("<QB")
_LENGTH = struct.Struct("<I")
_DTYPES = sorted(DTYPE_BYTES)
MAX_RUNS_BYTES = MAX_RUNS * _RUN.size

Run = tuple[int, int, str]
"""Start, end and dtype."""


def runs_of(layout: Layout, part: int) -> bytes:
    """Where the runs of a part begin, and their dtypes, for `Get`; empty where there are too many."""
    marks: list[tuple[int, str]] = []
    for start, tensor in places(layout, part):
        if not marks or marks[-1][1] != tensor.dtype:
            marks.append((start, tensor.dtype))
    if not 0 < len(marks) <= MAX_RUNS:
        return b""
    return b"".join(_RUN.pack(start, _DTYPES.index(dtype)) for start, dtype in marks)


def decode_runs(data: bytes) -> list[tuple[int, str]]:
    """Start and dtype of each run of a part. Raises WireError."""
    if len(data) % _RUN.size or len(data) > MAX_RUNS_BYTES:
        raise WireError(f"{len(data)} bytes do not say where runs of one dtype begin")
    marks = [*_RUN.iter_unpack(data)]
    starts = [start for start, _ in marks]
    if any(first >= second for first, second in itertools.pairwise(starts)) or starts[:1] != [0]:
        raise WireError("the runs of a part do not begin one after the other")
    if any(code >= len(_DTYPES) for _, code in marks):
        raise WireError("a run is of an unknown dtype")
    return [(start, _DTYPES[code]) for start, code in marks]


def digest_of_runs(data: bytes) -> bytes:
    return digest_of([memoryview(data)])


def runs_between(marks: list[tuple[int, str]], first: int, last: int) -> Iterator[Run]:
    """The runs of the bytes from `first` to `last`, counted from `first`."""
    ends = [*(start for start, _ in marks[1:]), last]
    for (start, dtype), end in zip(marks, ends, strict=True):
        if start < last and end > first:
            yield max(start, first) - first, min(end, last) - first, dtype


def encode_chunk(codec: Codec, base: Bytes, new: Bytes, runs: Iterator[Run]) -> bytes:
    """Raises WeightError for runs that do not fit."""
    wire = []
    for start, end, dtype in runs:
        payload = codecs.get(codec.key).encode(base[start:end], new[start:end], dtype)
        wire += [_LENGTH.pack(len(payload)), payload]
    return b"".join(wire)


def apply_chunk(codec: Codec, wire: memoryview, out: Bytes, runs: Iterator[Run]) -> None:
    """`out` holds the base, and then the new bytes. Raises WireError for a delta that is none."""
    for start, end, dtype in runs:
        if len(wire) < _LENGTH.size:
            raise WireError("a delta ends before its chunk does")
        (nbytes,) = _LENGTH.unpack(wire[: _LENGTH.size])
        payload, wire = wire[_LENGTH.size : _LENGTH.size + nbytes], wire[_LENGTH.size + nbytes :]
        codecs.get(codec.key).decode(payload, out[start:end], dtype)
    if wire:
        raise WireError(f"a delta goes on for {len(wire)} bytes behind its chunk")


def apply_to(
    base: Base, part: int, chunk: int, codec: Codec, wire: memoryview, runs: Iterator[Run], views: list[memoryview]
) -> None:
    """Fill the views of a chunk with the base's bytes, and change them. Raises WireError, WeightError."""
    if len(views) == 1:
        base.read(part, chunk, views)
        apply_chunk(codec, wire, np.frombuffer(views[0], np.uint8), runs)
        return
    # Codecs need a chunk in one piece.
    whole = np.empty(sum(map(len, views)), np.uint8)
    base.read(part, chunk, [whole.data])
    apply_chunk(codec, wire, whole, runs)
    at = 0
    for view in views:
        view[:] = whole[at : at + len(view)].data
        at += len(view)


@dataclass(frozen=True, slots=True)
class Key:
    """What a delta is of."""

    version: PolicyVersion
    base: PolicyVersion
    part: int
    chunk: int
    codec: Codec
    runs: bytes
    """Digest of where they begin."""


@dataclass(frozen=True, slots=True)
class Delta:
    wire: bytes
    digest: bytes
    """Of the wire bytes."""
    encode_s: float
    """What it took; 0 where it was there already."""


class DeltaCache:
    """Deltas that were made here or came here lately, the oldest given up first.

    Any thread; each is made by one thread only.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held: OrderedDict[Key, Delta] = OrderedDict()
        self._nbytes = 0
        self._making: dict[Key, Future[Delta]] = {}
        self._lock = threading.Lock()

    def get(self, key: Key, make: Callable[[], bytes]) -> Delta:
        """Waits for another thread that makes it, which waits for nothing. Raises what `make` does."""
        with self._lock:
            if key in self._held:
                return self._held[key]
            making = self._making.get(key)
            if making is None:
                mine = self._making[key] = Future()
        if making is not None:
            return making.result()
        start = time.perf_counter()
        try:
            wire = make()
            digest = digest_of([memoryview(wire)])
            made = Delta(wire, digest, 0.0)
            self.put(key, made)
            mine.set_result(made)
        except BaseException as error:
            mine.set_exception(error)
            raise
        finally:
            with self._lock:
                del self._making[key]
        return Delta(wire, digest, time.perf_counter() - start)

    def put(self, key: Key, delta: Delta) -> None:
        with self._lock:
            if key in self._held:
                return
            self._held[key] = delta
            self._nbytes += len(delta.wire)
            while self._nbytes > self._max_bytes:
                _, oldest = self._held.popitem(last=False)
                self._nbytes -= len(oldest.wire)


class Encoder:
    """Makes the deltas that one request asks for. For one thread, with two chunks of memory of its own."""

    def __init__(
        self, get: Get, change: Change, marks: list[tuple[int, str]], base: Held, new: Held, cache: DeltaCache
    ) -> None:
        """`marks` are the runs of the change, decoded. Closes `base` with itself."""
        self.codec = change.codec
        self._get = get
        self._change = change
        self._marks = marks
        self._runs_digest = digest_of_runs(change.runs)
        self._base = base
        self._new = new
        self._cache = cache
        self._scratch = np.empty((2, get.chunk_bytes), np.uint8)

    def encode(self, chunk: int) -> Delta:
        """Raises WeightError where the runs do not fit the chunk."""
        get, change = self._get, self._change
        key = Key(get.version, change.base, get.part, chunk, change.codec, self._runs_digest)
        return self._cache.get(key, lambda: self._make(chunk))

    def close(self) -> None:
        self._base.close()

    def _make(self, chunk: int) -> bytes:
        first = chunk * self._get.chunk_bytes
        last = min(first + self._get.chunk_bytes, self._get.nbytes)
        old, new = self._scratch[:, : last - first]
        self._base.segment.read(first, [old.data])
        self._new.segment.read(first, [new.data])
        return encode_chunk(self._change.codec, old, new, runs_between(self._marks, first, last))
