"""The manifest: what a weight version consists of, byte for byte, and its form on the wire.

On the wire it is msgpack `[schema, digest, body]`. The digest (xxh3-128) covers the body, so that a flipped byte
is refused before anything in it is believed; it detects damage, it does not authenticate. Whoever can write
manifests into the broker is trusted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgpack
import xxhash

from broker.messages import SCHEMA
from headrace.errors import WeightError, WireError
from headrace.version import PolicyVersion

ALIGNMENT = 64
"""Tensors start at multiples of this many bytes."""
CHUNK_BYTES = 4 << 20
"""What is digested, sent and verified by itself (see `weightsync/placement.py`)."""
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Wire dtypes and the size of one element."""

MAX_MANIFEST_BYTES = 32 << 20
MAX_TENSORS = 1 << 17
MAX_DIMS = 8
MAX_TEXT = 512
"""Longest name of a tensor, host, run or segment, in characters."""
MAX_LAYOUT_BYTES = 1 << 40
MAX_PARTS = 4096
MAX_CHUNK_BYTES = 64 << 20
DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor in the flat layout: row-major, little-endian, at `offset` bytes."""

    name: str
    """Parameter name as in the Hugging Face model's `named_parameters()`; tied tensors appear once."""
    dtype: str
    """"bfloat16", "float16" or "float32"."""
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


@dataclass(frozen=True, slots=True)
class Layout:
    """Order, place and type of all tensors of a model on the wire; the same for every version of a run."""

    tensors: tuple[TensorSpec, ...]
    nbytes: int
    parts: int = 1
    """Ranks of the trainer, each of which publishes its rows of every tensor."""
    chunk_bytes: int = CHUNK_BYTES

    @classmethod
    def of(
        cls, shapes: list[tuple[str, str, tuple[int, ...]]], parts: int = 1, chunk_bytes: int = CHUNK_BYTES
    ) -> Layout:
        """Lay (name, dtype, shape) triples out in order, each aligned to `ALIGNMENT`.

        Raises WeightError for an unknown dtype, a repeated name or sizes beyond the bounds of this module.
        """
        offset, specs = 0, []
        for name, dtype, shape in shapes:
            if dtype not in DTYPE_BYTES:
                raise WeightError(f"tensor {name!r} has dtype {dtype!r}; weights travel as {', '.join(DTYPE_BYTES)}")
            nbytes = size_of(dtype, shape)
            specs.append(TensorSpec(name, dtype, shape, offset, nbytes))
            offset += aligned(nbytes)
        layout = cls(tuple(specs), offset, parts, chunk_bytes)
        if reason := layout_fault(layout):
            raise WeightError(f"this model cannot be laid out: {reason}")
        return layout

    def part_nbytes(self, part: int) -> int:
        """Bytes of what one rank publishes."""
        if self.parts == 1:
            return self.nbytes
        rows = (rows_of(tensor, part, self.parts) for tensor in self.tensors)
        return sum(aligned(row_bytes * (last - first)) for row_bytes, first, last in rows)

    def chunks(self, part: int) -> int:
        """How many chunks one part has."""
        return -(-self.part_nbytes(part) // self.chunk_bytes)


def rows_of(tensor: TensorSpec, part: int, parts: int) -> tuple[int, int, int]:
    """Bytes of a row, and the first and the end of the rows that `torch.chunk` gives this part."""
    rows = tensor.shape[0] if tensor.shape else 1
    share = -(-rows // parts)
    first = min(rows, part * share)
    return tensor.nbytes // rows if rows else 0, first, min(rows, first + share)


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank of the trainer publishes of a version."""

    host: str
    segment: str
    """Name of the shared-memory segment on `host`."""
    digests: tuple[bytes, ...] = ()
    """xxh3-128 of each chunk; none before it is sealed."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """A version that is being published, or is sealed: nobody may commit one that is not sealed."""

    version: PolicyVersion
    layout: Layout
    parts: tuple[Part, ...]
    sealed: bool
    run_id: str = ""
    sealed_s: float = 0.0
    """When it was sealed: seconds since the epoch on the clock of the first part's host."""


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to the next multiple of `ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def size_of(dtype: str, shape: Iterable[int]) -> int:
    """Bytes of a dense tensor of a known dtype."""
    nbytes = DTYPE_BYTES[dtype]
    for dim in shape:
        nbytes *= dim
    return nbytes


def encode(manifest: Manifest) -> bytes:
    """Bytes of a manifest; `decode` is the inverse. Raises WeightError for one that `decode` would refuse."""
    if reason := manifest_fault(manifest):
        raise WeightError(f"manifest of version {manifest.version} is not valid: {reason}")
    tensors = [[t.name, t.dtype, list(t.shape), t.offset, t.nbytes] for t in manifest.layout.tensors]
    parts = [[part.host, part.segment, b"".join(part.digests)] for part in manifest.parts]
    body: bytes = msgpack.packb(
        [
            manifest.run_id,
            list(manifest.version),
            manifest.sealed,
            manifest.sealed_s,
            manifest.layout.nbytes,
            manifest.layout.chunk_bytes,
            tensors,
            parts,
        ]
    )
    data: bytes = msgpack.packb([SCHEMA, xxhash.xxh3_128_digest(body), body])
    return data


def decode(data: bytes) -> Manifest:
    """Read a manifest, checked whole: a manifest that this returns has sound sizes, places, types and digests.

    Raises WireError with the reason.
    """
    if len(data) > MAX_MANIFEST_BYTES:
        raise WireError(f"a manifest of {len(data)} bytes is over the bound of {MAX_MANIFEST_BYTES}")
    schema, digest, body = _typed(_unpack(data), "manifest", int, bytes, bytes)
    if schema != SCHEMA:
        raise WireError(f"manifest has schema {schema}, this process speaks {SCHEMA}; run one release everywhere")
    if xxhash.xxh3_128_digest(body) != digest:
        raise WireError("manifest does not match its own digest: its bytes were damaged on the way")
    manifest = _from_body(body)
    if reason := manifest_fault(manifest):
        raise WireError(f"manifest is not valid: {reason}")
    return manifest


def manifest_fault(manifest: Manifest) -> str | None:
    """Why this manifest may not be used, or None."""
    if manifest.version.incarnation < 0 or manifest.version.step < 0:
        return f"version {manifest.version} is negative"
    names = (manifest.run_id, *(name for part in manifest.parts for name in (part.host, part.segment)))
    if any(len(name) > MAX_TEXT for name in names):
        return f"a name is longer than {MAX_TEXT} characters"
    return layout_fault(manifest.layout) or _parts_fault(manifest)


def _parts_fault(manifest: Manifest) -> str | None:
    layout = manifest.layout
    if len(manifest.parts) != layout.parts:
        return f"{len(manifest.parts)} parts, where its layout has {layout.parts}"
    for number, part in enumerate(manifest.parts):
        chunks = layout.chunks(number) if manifest.sealed else 0
        if len(part.digests) != chunks:
            return f"{len(part.digests)} digests for the {chunks} chunks of part {number}"
        if any(len(digest) != DIGEST_BYTES for digest in part.digests):
            return f"a digest is not {DIGEST_BYTES} bytes"
    return None


def layout_fault(layout: Layout) -> str | None:
    """Why this layout is not one that `Layout.of` makes, or None."""
    if not 0 < len(layout.tensors) <= MAX_TENSORS:
        return f"{len(layout.tensors)} tensors, not 1 to {MAX_TENSORS}"
    if not 0 <= layout.nbytes <= MAX_LAYOUT_BYTES:
        return f"{layout.nbytes} bytes, not 0 to {MAX_LAYOUT_BYTES}"
    if layout.chunk_bytes < ALIGNMENT or layout.chunk_bytes % ALIGNMENT or layout.chunk_bytes > MAX_CHUNK_BYTES:
        return f"chunks of {layout.chunk_bytes} bytes, not a multiple of {ALIGNMENT} up to {MAX_CHUNK_BYTES}"
    if not 0 < layout.parts <= MAX_PARTS:
        return f"{layout.parts} parts, not 1 to {MAX_PARTS}"
    names: set[str] = set()
    end = 0
    for tensor in layout.tensors:
        if reason := _tensor_fault(tensor, end):
            return f"tensor {tensor.name[:MAX_TEXT]!r} {reason}"
        if tensor.name in names:
            return f"tensor {tensor.name!r} appears twice"
        names.add(tensor.name)
        end += aligned(tensor.nbytes)
    if end != layout.nbytes:
        return f"its tensors take {end} bytes, not {layout.nbytes}"
    return None


def _tensor_fault(tensor: TensorSpec, end: int) -> str | None:
    """`end` is where the tensor before it ends, with what aligns the next."""
    if not 0 < len(tensor.name) <= MAX_TEXT:
        return f"has a name of {len(tensor.name)} characters, not 1 to {MAX_TEXT}"
    if tensor.dtype not in DTYPE_BYTES:
        return f"has the unknown dtype {tensor.dtype[:MAX_TEXT]!r}"
    if len(tensor.shape) > MAX_DIMS or any(not 0 <= dim <= MAX_LAYOUT_BYTES for dim in tensor.shape):
        return f"has a shape beyond {MAX_DIMS} dimensions or with a size out of range"
    if tensor.nbytes != size_of(tensor.dtype, tensor.shape):
        return f"has {tensor.nbytes} bytes, which its shape does not make"
    if tensor.offset != end:
        return f"starts at {tensor.offset}, not at {end}"
    return None


def _from_body(body: bytes) -> Manifest:
    run_id, version, sealed, sealed_s, nbytes, chunk_bytes, rows, parts = _typed(
        _unpack(body), "manifest", str, list, bool, float, int, int, list, list
    )
    incarnation, step = _typed(version, "version", int, int)
    if len(rows) > MAX_TENSORS:
        raise WireError(f"manifest lists more than {MAX_TENSORS} tensors")
    if len(parts) > MAX_PARTS:
        raise WireError(f"manifest lists more than {MAX_PARTS} parts")
    return Manifest(
        version=PolicyVersion(incarnation, step),
        layout=Layout(tuple(_tensor(row) for row in rows), nbytes, len(parts), chunk_bytes),
        parts=tuple(_part(row) for row in parts),
        sealed=sealed,
        run_id=run_id,
        sealed_s=sealed_s,
    )


def _part(row: Any) -> Part:
    host, segment, digests = _typed(row, "part", str, str, bytes)
    if len(digests) % DIGEST_BYTES:
        raise WireError(f"manifest: the digests of a part are {len(digests)} bytes, not a multiple of {DIGEST_BYTES}")
    return Part(host, segment, cut(digests))


def _tensor(row: Any) -> TensorSpec:
    name, dtype, shape, offset, nbytes = _typed(row, "tensor", str, str, list, int, int)
    if len(shape) > MAX_DIMS or not all(type(dim) is int for dim in shape):
        raise WireError(
            f"manifest: the shape of tensor {name[:MAX_TEXT]!r} is not a list of at most {MAX_DIMS} numbers"
        )
    return TensorSpec(name, dtype, tuple(shape), offset, nbytes)


def cut(digests: bytes) -> tuple[bytes, ...]:
    """One digest after the other, as single ones."""
    return tuple(digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES))


def _unpack(data: bytes) -> Any:
    """msgpack with every length bounded before it is allocated."""
    try:
        return msgpack.unpackb(
            data,
            raw=False,
            use_list=True,
            max_str_len=MAX_TEXT * 4,
            max_bin_len=len(data),
            max_array_len=MAX_TENSORS,
            max_map_len=0,
            max_ext_len=0,
        )
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise WireError(f"manifest is not valid msgpack: {error or type(error).__name__}") from error


def _typed(row: Any, what: str, *types: type) -> Any:
    """`row` as it is, once it is a list of exactly these types."""
    if type(row) is not list or [type(value) for value in row] != list(types):
        raise WireError(f"{what} in the manifest is not made of {', '.join(kind.__name__ for kind in types)}")
    return row
