"""Same host: chunks are read from the segment's file straight into their places, with rests between them."""

from __future__ import annotations

import asyncio
import time

from headrace.errors import WeightError
from weightsync.arena import Arena, Segment
from weightsync.digests import Pace, digest_of
from weightsync.manifest import Manifest
from weightsync.placement import Placement
from weightsync.transports.api import Base, Unavailable, ended

LOOK_S = 0.005
"""Between two looks whether the next chunk of a version that is being published is ready."""
WAIT_S = 1.0


class ShmTransport:
    """Opens segments of this host: the trainer's own, and what this host's weight service brought from another."""

    kind = "shm"

    def __init__(self, host: str, arena: Arena | None = None) -> None:
        self._host = host
        self._arena = arena or Arena()

    async def open(self, manifest: Manifest, part: int, base: Base | None = None) -> ShmSource | Unavailable:
        """A segment of the wrong size is unavailable. Raises WeightError for a version of another host."""
        theirs = manifest.parts[part]
        if theirs.host != self._host:
            raise WeightError(
                f"weight version {manifest.version} lies on host {theirs.host!r}, this is {self._host!r}: "
                f"transport shm reaches only its own host; start this producer on {theirs.host!r}"
            )
        try:
            segment = self._arena.open(theirs.segment, manifest.layout, part)
        except WeightError as error:
            return Unavailable(str(error))
        return Unavailable(f"segment {theirs.segment} is gone") if segment is None else ShmSource(segment)

    async def close(self) -> None:
        """There is nothing to let go."""


class ShmSource:
    def __init__(self, segment: Segment) -> None:
        self._segment = segment

    async def fetch(self, chunks: range, out: Placement, pace: Pace) -> list[bytes] | Unavailable:
        reading = asyncio.ensure_future(asyncio.to_thread(self._read, chunks, out, pace))
        try:
            return await asyncio.shield(reading)
        except asyncio.CancelledError:
            await ended(reading)
            raise
        except WeightError as error:
            return Unavailable(str(error))

    async def close(self) -> None:
        """In a thread: closing the last file of a freed version gives all its pages back, which takes a while."""
        await asyncio.to_thread(self._segment.close)

    def _read(self, chunks: range, out: Placement, pace: Pace) -> list[bytes] | Unavailable:
        until = time.monotonic() + WAIT_S
        while (ready := self._segment.ready()) <= chunks.start and time.monotonic() < until:
            time.sleep(LOOK_S)
        if ready <= chunks.start and self._segment.freed and not self._segment.complete:
            return Unavailable(f"segment {self._segment.name} was given up")
        digests = []
        pace.start()
        for chunk in range(chunks.start, min(ready, chunks.stop)):
            views = out.views(chunk)
            self._segment.read(out.bounds[chunk][0], views)
            # While it is warm in the cache.
            digests.append(digest_of(views))
            pace.rest()
        return digests
