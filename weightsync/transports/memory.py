"""In one process, for tests: the parts of versions lie in a dict."""

from __future__ import annotations

from collections.abc import MutableMapping

from weightsync.digests import Pace, digest_of
from weightsync.manifest import Manifest
from weightsync.placement import Bytes, Placement
from weightsync.transports.api import Base, Unavailable


class MemoryTransport:
    """Opens what `store` holds under the segment's name."""

    kind = "memory"

    def __init__(self, store: MutableMapping[str, Bytes]) -> None:
        self._store = store

    async def open(self, manifest: Manifest, part: int, base: Base | None = None) -> MemorySource | Unavailable:
        name, nbytes = manifest.parts[part].segment, manifest.layout.part_nbytes(part)
        data = self._store.get(name)
        if data is None:
            return Unavailable(f"segment {name} is gone")
        if data.nbytes != nbytes:
            return Unavailable(f"segment {name} has {data.nbytes} bytes, not {nbytes}")
        return MemorySource(data)

    async def close(self) -> None:
        """There is nothing to let go."""


class MemorySource:
    def __init__(self, data: Bytes) -> None:
        self._data = data.data

    async def fetch(self, chunks: range, out: Placement, pace: Pace) -> list[bytes] | Unavailable:
        """On the event loop itself: what is tested with it is small."""
        digests = []
        for chunk in chunks:
            at = out.bounds[chunk][0]
            views = out.views(chunk)
            for view in views:
                view[:] = self._data[at : at + len(view)]
                at += len(view)
            digests.append(digest_of(views))
        return digests

    async def close(self) -> None:
        self._data = memoryview(b"")
