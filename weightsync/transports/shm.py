"""Same host: the segment is mapped, and copied in blocks with rests between them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from headrace.errors import WeightError
from weightsync.arena import Arena, Bytes
from weightsync.digests import BLOCK_BYTES, Pace
from weightsync.manifest import Manifest
from weightsync.transports.api import Range, Unavailable


class ShmTransport:
    """Opens segments of this host."""

    kind = "shm"

    def __init__(self, host: str, arena: Arena | None = None) -> None:
        self._host = host
        self._arena = arena or Arena()

    async def open(self, manifest: Manifest) -> ShmSource | Unavailable:
        """Map the segment; one of the wrong size is unavailable. Raises WeightError for a version of another host."""
        if manifest.host != self._host:
            raise WeightError(
                f"weight version {manifest.version} lies on host {manifest.host!r}, this is {self._host!r}: "
                f"transport shm reaches only its own host; start this producer on {manifest.host!r}"
            )
        try:
            data = self._arena.open(manifest.segment, manifest.layout.nbytes)
        except WeightError as error:
            return Unavailable(str(error))
        return Unavailable(f"segment {manifest.segment} is gone") if data is None else ShmSource(data)


class ShmSource:
    """A mapped version; shared by no one else in this process."""

    def __init__(self, data: Bytes) -> None:
        self._data: Bytes | None = data

    async def fetch(self, ranges: Sequence[Range], out: Bytes, pace: Pace) -> Unavailable | None:
        assert self._data is not None, "fetch after close"
        await asyncio.to_thread(copy_ranges, self._data, ranges, out, pace)
        return None

    async def close(self) -> None:
        """In a thread: unmapping the last mapping of a freed version gives all its pages back, which takes a while."""
        if self._data is not None:
            last_reference, self._data = [self._data], None
            await asyncio.to_thread(last_reference.clear)


def copy_ranges(data: Bytes, ranges: Sequence[Range], out: Bytes, pace: Pace) -> None:
    """Copy ranges of `data` to the same places of `out`, resting after each block. numpy releases the GIL in each."""
    pace.start()
    for start, end in ranges:
        for at in range(start, end, BLOCK_BYTES):
            stop = min(at + BLOCK_BYTES, end)
            np.copyto(out[at:stop], data[at:stop])
            pace.rest()
