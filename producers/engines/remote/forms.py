"""How a server keeps the tensors of the wire: fused, in another dtype, padded, and each rank of it a shard.

None of this is told by the server, so it is tried out: the form whose checksum a server answers is the one that it has.
That two forms of different numbers have the same checksum does not happen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from producers.engines.remote.digesting import Bytes, converted
from producers.engines.remote.staged import Staged
from weightsync.manifest import DTYPE_BYTES, Layout, TensorSpec

Split = Literal["whole", "rows", "columns", "vocabulary"]
"""Which part of a matrix a rank has. "vocabulary" is rows, after rows of zeros were added at the end."""

ROWS_PADDED = 64
"""A vocabulary is filled up to a multiple of this, and of this times the ranks where they would not divide it."""
_FUSED = (("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("gate_up_proj", ("gate_proj", "up_proj")))
_SHARED = ("k_proj", "v_proj")
"""Of which there may be fewer heads than ranks, so that some have the same."""
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Shard:
    """Of a tensor-parallel server."""

    rank: int
    ranks: int


@dataclass(frozen=True, slots=True)
class Form:
    """How a server keeps one tensor."""

    dtype: str
    split: Split = "whole"
    shares: int = 1
    """Into so many parts keys and values are split, by rows."""


@dataclass(frozen=True, slots=True)
class Comparable:
    """One tensor of a server, and those of the wire that it is made of, one below the other."""

    name: str
    sources: tuple[TensorSpec, ...]

    def forms(self, likely: str, ranks: int) -> Iterator[Form]:
        """In which it may be kept, the most likely first."""
        for dtype in sorted(DTYPE_BYTES, key=lambda dtype: dtype != likely):
            for split, shares in self._splits(ranks):
                yield Form(dtype, split, shares)

    def bytes(self, staged: Staged, form: Form, shard: Shard) -> Iterator[Bytes]:
        """As that rank of the server keeps it."""
        for spec in self.sources:
            yield from converted(_part(staged.tensor(spec), spec, form, shard), spec.dtype, form.dtype)
        if form.split == "vocabulary":
            rows, width = self.sources[0].shape
            share = _padded(rows, shard.ranks) // shard.ranks
            there = min(max(rows - shard.rank * share, 0), share)
            yield np.zeros((share - there) * width * DTYPE_BYTES[form.dtype], np.uint8)

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.sources)

    @property
    def kind(self) -> str:
        """The same for that tensor in each layer."""
        return ".".join("*" if part.isdecimal() else part for part in self.name.split("."))

    @property
    def norm(self) -> bool:
        """Every rank has all of it."""
        return len(self.sources) == 1 and len(self.sources[0].shape) == 1 and "norm" in self.name

    def _splits(self, ranks: int) -> Iterator[tuple[Split, int]]:
        shapes = [spec.shape for spec in self.sources]
        if ranks > 1 and not self.norm and all(shape and shape[0] % ranks == 0 for shape in shapes[:1]):
            for shares in range(ranks, 0, -1):
                if ranks % shares == 0 and all(shape[0] % shares == 0 for shape in shapes):
                    yield "rows", shares
        if ranks > 1 and len(shapes) == 1 and len(shapes[0]) == 2 and shapes[0][1] % ranks == 0:
            yield "columns", 1
        yield "whole", 1
        if len(shapes) == 1 and len(shapes[0]) == 2 and (ranks > 1 or shapes[0][0] % ROWS_PADDED):
            yield "vocabulary", 1


def made(layout: Layout, names: Iterable[str]) -> list[Comparable]:
    """Those of a server's tensors of which is known what they are made of."""
    known = {spec.name: spec for spec in layout.tensors}
    found = [Comparable(name, tuple(known[source] for source in sources(name, known))) for name in names]
    return [one for one in found if one.sources]


def sources(name: str, known: Iterable[str]) -> tuple[str, ...]:
    """The tensors of the wire that a server's tensor is made of, in its order; none where that is not known."""
    if name in known:
        return (name,)
    for fused, parts in _FUSED:
        made_of = tuple(name.replace(f".{fused}.", f".{part}.") for part in parts)
        if f".{fused}." in name and all(part in known for part in made_of):
            return made_of
    # A server whose head is a tensor of its own although the model ties it.
    return (_EMBEDDING,) if name == _HEAD and _EMBEDDING in known else ()


def _part(data: Bytes, spec: TensorSpec, form: Form, shard: Shard) -> Bytes:
    """What one rank has of one tensor, in the wire's dtype."""
    if form.split == "whole":
        return data
    rows = data.reshape(spec.shape[0], -1)
    if form.split == "columns":
        width = rows.shape[1] // shard.ranks
        return rows[:, shard.rank * width : (shard.rank + 1) * width].reshape(-1)
    if form.split == "vocabulary":
        share = _padded(len(rows), shard.ranks) // shard.ranks
        return rows[shard.rank * share : (shard.rank + 1) * share].reshape(-1)
    shares = form.shares if any(f".{one}." in spec.name for one in _SHARED) else shard.ranks
    at, share = shard.rank * shares // shard.ranks, len(rows) // shares
    return rows[at * share : (at + 1) * share].reshape(-1)


def _padded(rows: int, ranks: int) -> int:
    padded = -(-rows // ROWS_PADDED) * ROWS_PADDED
    if padded % ranks:
        padded = -(-rows // (ROWS_PADDED * ranks)) * ROWS_PADDED * ranks
    return padded
