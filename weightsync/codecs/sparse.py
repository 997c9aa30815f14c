"""Deltas of a chunk: which elements changed, and to what (`sparse-abs`) or by how much (`sparse-ulp`).

A payload begins with a byte that says what follows it:

    0   the new bytes themselves, where the sparse form would take more than `DENSE_SHARE` of them
    1   count:u32, gap width:u8, value width:u8, then one zstd frame

The frame holds, for the changed elements in order, the number of unchanged ones before each (since the last changed
one), then their values. Both are little-endian and lie as byte planes: all lowest bytes, then all second ones, and so
on up to the width, which leaves out the planes that would hold only zeros. Each plane is in blocks of its own, so that
zstd counts its bytes apart from those of the others.

`sparse-abs` sends the new bits as values, so that applying it twice does no harm. `sparse-ulp` sends the steps that
each element moved along its dtype's numbers in order, which after an optimizer step is mostly one, up or down.
Both lean on the base being the right one: digests tell.
"""

from __future__ import annotations

import struct
import threading

import numpy as np
import numpy.typing as npt
import zstandard

from headrace.errors import WeightError, WireError
from weightsync.codecs.raw import fill
from weightsync.codecs.ulp import Bits, moved, steps_between
from weightsync.manifest import DTYPE_BYTES, MAX_CHUNK_BYTES
from weightsync.placement import Bytes

DENSE_SHARE = 0.6

_DENSE, _SPARSE = 0, 1
_HEADER = struct.Struct("<BIBB")
_GAP_WIDTH = 4
_WORD = 8
_LEVEL = 1

Places = npt.NDArray[np.int64]


class _Contexts(threading.local):
    """zstd's working memory, which no two threads may share."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=_LEVEL)
        self.decompressor = zstandard.ZstdDecompressor()


_contexts = _Contexts()


class Sparse:
    def __init__(self, name: str, *, steps: bool) -> None:
        self.name = name
        self._steps = steps

    def encode(self, base: Bytes | None, new: Bytes, dtype: str) -> bytes:
        if base is None or base.nbytes != new.nbytes:
            raise WeightError(f"codec {self.name} needs a base of {new.nbytes} bytes, as long as the new chunk")
        old_bits, new_bits = _elements(base, dtype), _elements(new, dtype)
        places = _changed(old_bits, new_bits)
        values = new_bits[places]
        if self._steps:
            values = steps_between(old_bits[places], values)
        gaps = np.diff(places, prepend=-1) - 1
        payload = _pack(gaps.astype("<u4"), values)
        if len(payload) > DENSE_SHARE * new.nbytes:
            return bytes([_DENSE]) + new.data
        return payload

    def decode(self, payload: bytes | memoryview, out: Bytes, dtype: str) -> None:
        bits = _elements(out, dtype)
        if payload and payload[0] == _DENSE:
            fill(out, memoryview(payload)[1:])
            return
        gaps, values = _unpack(memoryview(payload), bits)
        places = np.cumsum(gaps + 1) - 1
        if places.size and places[-1] >= bits.size:
            raise WireError(f"a delta changes element {places[-1]} of a chunk that has {bits.size}")
        bits[places] = moved(bits[places], values) if self._steps else values


def _elements(data: Bytes, dtype: str) -> Bits:
    """The same memory as unsigned integers, one per element."""
    width = DTYPE_BYTES.get(dtype)
    if width is None:
        raise WeightError(f"dtype {dtype[:64]!r} is not known; weights travel as {', '.join(DTYPE_BYTES)}")
    if data.nbytes % width or data.nbytes > MAX_CHUNK_BYTES:
        raise WeightError(f"{data.nbytes} bytes are not whole {dtype} elements in a chunk of at most {MAX_CHUNK_BYTES}")
    return data.view(f"<u{width}")


def _changed(old: Bits, new: Bits) -> Places:
    """Where they differ, in order. Words are compared first: few of them have a change in them."""
    per_word = _WORD // new.itemsize
    whole = new.size // per_word * per_word
    old_words, new_words = old[:whole].view(np.uint64), new[:whole].view(np.uint64)
    words = np.flatnonzero(old_words != new_words)
    differs = (old_words[words] ^ new_words[words]).view(new.dtype) != 0
    hits = np.flatnonzero(differs)
    inside = words[hits // per_word] * per_word + hits % per_word
    return np.concatenate([inside, np.flatnonzero(old[whole:] != new[whole:]) + whole])


def _pack(gaps: Bits, values: Bits) -> bytes:
    planes = [_planes(gaps), _planes(values)]
    header = _HEADER.pack(_SPARSE, gaps.size, len(planes[0]), len(planes[1]))
    frame = _contexts.compressor.compressobj(size=sum(both.size for both in planes))
    blocks = [header]
    for plane in (*planes[0], *planes[1]):
        blocks += [frame.compress(plane), frame.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)]
    return b"".join([*blocks, frame.flush()])


def _unpack(payload: memoryview, bits: Bits) -> tuple[Places, Bits]:
    """Gaps and values of a sparse payload for a chunk of these elements."""
    if len(payload) < _HEADER.size or payload[0] != _SPARSE:
        raise WireError("a chunk came with bytes that are not a delta")
    _, count, gap_width, value_width = _HEADER.unpack_from(payload)
    if count > bits.size or gap_width > _GAP_WIDTH or value_width > bits.itemsize:
        raise WireError(
            f"a delta says {count} changes of {gap_width} + {value_width} bytes; "
            f"the chunk has {bits.size} elements of {bits.itemsize}"
        )
    width = gap_width + value_width
    planes = _decompressed(payload[_HEADER.size :], width * count).reshape(width, count)
    return _joined(planes[:gap_width], "<i8"), _joined(planes[gap_width:], bits.dtype)


def _planes(values: Bits) -> Bytes:
    """One row per byte of the largest value, the lowest first."""
    width = (int(values.max(initial=0)).bit_length() + 7) // 8
    return np.ascontiguousarray(values.view(np.uint8).reshape(values.size, values.itemsize)[:, :width].T)


def _joined(planes: Bytes, dtype: npt.DTypeLike) -> Bits:
    values = np.zeros(planes.shape[1], dtype)
    values.view(np.uint8).reshape(values.size, values.itemsize)[:, : len(planes)] = planes.T
    return values


def _decompressed(frame: memoryview, size: int) -> Bytes:
    """`size` bytes: what the frame itself says is compared before anything is allocated."""
    try:
        said = zstandard.frame_content_size(frame)
        if said != size:
            raise WireError(f"a delta holds {said} bytes, its header says {size}")
        return np.frombuffer(_contexts.decompressor.decompress(frame, allow_extra_data=False), np.uint8)
    except zstandard.ZstdError as error:
        raise WireError(f"a delta does not decompress: {error}") from error


SPARSE_ABS = Sparse("sparse-abs", steps=False)
SPARSE_ULP = Sparse("sparse-ulp", steps=True)
