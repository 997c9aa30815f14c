"""Where the bytes of a version lie: a version is made of parts, a part of chunks, and each has its place in the layout.

A part is what one rank of the trainer publishes, in a segment of its own. Of every tensor it holds the rows that
`torch.chunk` gives that rank (as FSDP2 shards parameters), one after the other, each at a multiple of `ALIGNMENT`.
Where there is one rank, its part is the flat layout itself. A chunk is `chunk_bytes` of a part, the last one shorter:
what is digested, sent, verified, relayed and encoded by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from weightsync.manifest import ALIGNMENT, Layout, TensorSpec, aligned, rows_of

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive bytes of a part that are consecutive in the layout as well."""

    start: int
    """In the part."""
    place: int
    """In the layout."""
    nbytes: int
    tensor: TensorSpec | None = None
    """None where it is more than one tensor's."""


@lru_cache(maxsize=64)
def pieces(layout: Layout, part: int) -> tuple[Piece, ...]:
    """The pieces of one part, in order."""
    if layout.parts == 1:
        return (Piece(0, 0, layout.nbytes),)
    found, start = [], 0
    for tensor in layout.tensors:
        row_bytes, first, last = rows_of(tensor, part, layout.parts)
        nbytes = row_bytes * (last - first)
        if nbytes:
            found.append(Piece(start, tensor.offset + row_bytes * first, nbytes, tensor))
            start += aligned(nbytes)
    return tuple(found)


def chunk_bounds(layout: Layout, part: int) -> list[tuple[int, int]]:
    """Start and end of each chunk of a part."""
    nbytes = layout.part_nbytes(part)
    return [*pairwise((*range(0, nbytes, layout.chunk_bytes), nbytes))]


class Placement:
    """A buffer [layout.nbytes] as the place of one part's chunks."""

    def __init__(self, layout: Layout, part: int, out: Bytes) -> None:
        self.bounds = chunk_bounds(layout, part)
        self._pieces = pieces(layout, part)
        self._out = out.data
        self._gap = memoryview(bytearray(ALIGNMENT))

    def views(self, chunk: int) -> list[memoryview]:
        """Writable views that together are the chunk, in order; what lies between pieces goes to a place of no use."""
        start, end = self.bounds[chunk]
        return [*self._views(start, end)]

    def _views(self, start: int, end: int) -> Iterator[memoryview]:
        at = start
        for piece in self._pieces:
            if piece.start >= end or piece.start + piece.nbytes <= start:
                continue
            if piece.start > at:
                yield self._gap[: piece.start - at]
                at = piece.start
            last = min(end, piece.start + piece.nbytes)
            shift = piece.place - piece.start
            yield self._out[at + shift : last + shift]
            at = last
        if at < end:
            yield self._gap[: end - at]


def tensors_in(layout: Layout, part: int, chunk: int) -> list[TensorSpec]:
    """Tensors that have bytes in this chunk."""
    start, end = chunk_bounds(layout, part)[chunk]
    begun = places(layout, part)
    ends = [*(place for place, _ in begun[1:]), end]
    return [tensor for (place, tensor), last in zip(begun, ends, strict=True) if place < end and last > start]


@lru_cache(maxsize=64)
def places(layout: Layout, part: int) -> tuple[tuple[int, TensorSpec], ...]:
    """Where each tensor begins that has bytes in a part."""
    if layout.parts == 1:
        return tuple((tensor.offset, tensor) for tensor in layout.tensors if tensor.nbytes)
    return tuple((piece.start, piece.tensor) for piece in pieces(layout, part) if piece.tensor is not None)
