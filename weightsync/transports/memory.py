"""In one process, for tests: versions lie in a dict."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence

from weightsync.arena import Bytes
from weightsync.digests import Pace
from weightsync.manifest import Manifest
from weightsync.transports.api import Range, Unavailable
from weightsync.transports.shm import copy_ranges


class MemoryTransport:
    """Opens what `store` holds under the segment's name."""

    kind = "memory"

    def __init__(self, store: MutableMapping[str, Bytes]) -> None:
        self._store = store

    async def open(self, manifest: Manifest) -> MemorySource | Unavailable:
        data = self._store.get(manifest.segment)
        if data is None:
            return Unavailable(f"segment {manifest.segment} is gone")
        if data.nbytes != manifest.layout.nbytes:
            return Unavailable(f"segment {manifest.segment} has {data.nbytes} bytes, not {manifest.layout.nbytes}")
        return MemorySource(data)


class MemorySource:
    def __init__(self, data: Bytes) -> None:
        self._data: Bytes | None = data

    async def fetch(self, ranges: Sequence[Range], out: Bytes, pace: Pace) -> Unavailable | None:
        """On the event loop itself: what is tested with it is small."""
        assert self._data is not None, "fetch after close"
        copy_ranges(self._data, ranges, out, pace)
        return None

    async def close(self) -> None:
        self._data = None
