"""Digests of tensors: xxh3-128 over the bytes as they lie in the flat layout.

It finds damage (12 to 30 GB/s on one core, far above any wire); it is no defence against a forger.
"""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt
import xxhash

from weightsync.manifest import Layout, TensorSpec

BLOCK_BYTES = 4 << 20
"""Work between two rests of a paced loop: long enough to be efficient, short enough not to be felt."""
MAX_REST_S = 0.05


class Pace:
    """Keeps a copying or hashing thread busy for at most a share of the time, so that decoding beside it goes on."""

    def __init__(self, share: float = 1.0) -> None:
        """`share` of the wall time may be work, above 0 up to 1 (no rest at all)."""
        if not 0.0 < share <= 1.0:
            raise ValueError(f"share = {share} is not in (0, 1]")
        self._rest_per_work = 1.0 / share - 1.0
        self._since = time.perf_counter()

    def start(self) -> None:
        """A piece of work begins now."""
        self._since = time.perf_counter()

    def rest(self) -> None:
        """A piece of work ended: sleep its part, `MAX_REST_S` at most, and begin the next."""
        if self._rest_per_work > 0.0:
            time.sleep(min(MAX_REST_S, (time.perf_counter() - self._since) * self._rest_per_work))
        self.start()


def digest_of(data: npt.NDArray[np.uint8], pace: Pace | None = None) -> str:
    """Hex digest of these bytes. Releases the GIL while it hashes a block."""
    state = xxhash.xxh3_128()
    for start in range(0, data.nbytes, BLOCK_BYTES):
        state.update(data[start : start + BLOCK_BYTES].data)
        if pace is not None:
            pace.rest()
    return state.hexdigest()


def digests_of(layout: Layout, data: npt.NDArray[np.uint8]) -> tuple[str, ...]:
    """Digest of each tensor of a buffer in this layout, in order."""
    return tuple(digest_of(data[tensor.offset : tensor.end]) for tensor in layout.tensors)


def first_mismatch(
    layout: Layout, digests: tuple[str, ...], data: npt.NDArray[np.uint8], pace: Pace
) -> TensorSpec | None:
    """The first tensor whose bytes are not those that were digested, or None when all are."""
    pace.start()
    for tensor, expected in zip(layout.tensors, digests, strict=True):
        if digest_of(data[tensor.offset : tensor.end], pace) != expected:
            return tensor
    return None
