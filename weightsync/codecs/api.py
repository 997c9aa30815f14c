"""The codec seam: the bytes of one chunk of a version, alone or as the difference from a base that both sides hold."""

from __future__ import annotations

from typing import Protocol

from weightsync.placement import Bytes


class Codec(Protocol):
    """Lossless for every bit pattern. One call is one chunk; calls may run in several threads at once.

    Arrays are contiguous, and as long as a whole number of elements of `dtype` (a key of `manifest.DTYPE_BYTES`).
    """

    name: str

    def encode(self, base: Bytes | None, new: Bytes, dtype: str) -> bytes | memoryview:
        """What makes `new` out of `base`, which is as long, or None for `raw`, which needs none.

        A memoryview is of `new` itself. Raises WeightError for arrays that do not fit the dtype or each other.
        """
        ...

    def decode(self, payload: bytes | memoryview, out: Bytes, dtype: str) -> None:
        """Turn the base's bytes in `out` into the new ones.

        Raises WireError for a payload that is none, before it allocates or writes anything beyond the size of `out`;
        `out` is then undefined. A damaged payload may also give other bits, which is for digests to find.
        """
        ...
