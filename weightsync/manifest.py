"""The manifest: what a weight version consists of, byte for byte."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.version import PolicyVersion

ALIGNMENT = 64
"""Tensors start at multiples of this many bytes."""


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


@dataclass(frozen=True, slots=True)
class Layout:
    """Order, place and type of all tensors of a model on the wire; the same for every version of a run."""

    tensors: tuple[TensorSpec, ...]
    nbytes: int

    @classmethod
    def of(cls, shapes: list[tuple[str, str, tuple[int, ...]]]) -> Layout:
        """Lay (name, dtype, shape) triples out in order, each aligned to `ALIGNMENT`."""
        size = {"bfloat16": 2, "float16": 2, "float32": 4}
        offset, specs = 0, []
        for name, dtype, shape in shapes:
            nbytes = size[dtype]
            for dim in shape:
                nbytes *= dim
            specs.append(TensorSpec(name, dtype, shape, offset, nbytes))
            offset += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return cls(tuple(specs), offset)


@dataclass(frozen=True, slots=True)
class Manifest:
    """A sealed version: nobody may commit one that is not sealed."""

    version: PolicyVersion
    layout: Layout
    digests: tuple[str, ...]
    """xxh3-128 of each tensor's bytes, hex, in layout order."""
    host: str
    segment: str
    """Name of the shared-memory segment on `host`."""
    sealed: bool
