"""Digests of chunks: xxh3-128 over their bytes.

It finds damage (12 to 30 GB/s on one core, far above any wire); it is no defence against a forger.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import xxhash

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


def digest_of(views: Sequence[memoryview], pace: Pace | None = None) -> bytes:
    """Digest of these bytes, one after the other. Releases the GIL while it hashes a block."""
    state = xxhash.xxh3_128()
    for view in views:
        for start in range(0, len(view), BLOCK_BYTES):
            state.update(view[start : start + BLOCK_BYTES])
            if pace is not None:
                pace.rest()
    return state.digest()
