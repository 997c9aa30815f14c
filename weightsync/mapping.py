"""Versions that an engine reads where the trainer of its host has put them: nothing is transferred."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from headrace.errors import WeightError
from weightsync.arena import Arena
from weightsync.digests import Pace, digest_of
from weightsync.manifest import Layout, Manifest
from weightsync.placement import Bytes, chunk_bounds
from weightsync.transports.api import Unavailable


@runtime_checkable
class MapsVersions(Protocol):
    """What an engine may offer besides a back buffer."""

    def map(self, layout: Layout, data: Bytes) -> None:
        """The next version lies in `data` [layout.nbytes], which does not change; its memory is the array's.

        Raises WeightError when the layout does not fit the engine's model.
        """
        ...


def mappable(manifest: Manifest, host: str) -> bool:
    """Whether the version lies on this host, in one piece."""
    return manifest.layout.parts == 1 and manifest.parts[0].host == host


def mapped(arena: Arena, manifest: Manifest, pace: Pace) -> Bytes | Unavailable | None:
    """The bytes of a sealed version in place; None where a chunk does not have its digest. Blocks while it reads."""
    layout, part = manifest.layout, manifest.parts[0]
    try:
        segment = arena.open(part.segment, layout)
    except WeightError as error:
        return Unavailable(str(error))
    if segment is None:
        return Unavailable(f"segment {part.segment} is gone")
    try:
        data = segment.map()
    finally:
        segment.close()
    view = data.data
    pace.start()
    for (start, end), digest in zip(chunk_bounds(layout, 0), part.digests, strict=True):
        if digest_of([view[start:end]]) != digest:
            return None
        pace.rest()
    return data
