"""A sealed version, whole, out of this host's memory: for whoever wants its content again, and not just the newest."""

from __future__ import annotations

import numpy as np

from broker.api import Peer
from headrace.hosts import host_name
from weightsync.arena import Arena
from weightsync.digests import Pace
from weightsync.manifest import Manifest
from weightsync.placement import Bytes, Placement, tensors_in
from weightsync.transports.api import Unavailable
from weightsync.transports.auto import AutoTransport

ROUND_CHUNKS = 16


async def read_whole(manifest: Manifest, arena: Arena) -> Bytes | Unavailable:
    """All bytes of its layout [nbytes], each chunk compared with its digest; else why they cannot be had."""
    if not manifest.sealed:
        return Unavailable(f"version {manifest.version} is not sealed")
    out = np.zeros(manifest.layout.nbytes, np.uint8)
    for part in range(manifest.layout.parts):
        if reason := await _read(manifest, part, out, arena):
            return Unavailable(f"version {manifest.version} {reason}")
    return out


async def _read(manifest: Manifest, part: int, out: Bytes, arena: Arena) -> str:
    """Why one part cannot be had; empty once it is in its place."""
    # Whichever host it was published on: nobody is waited for who may yet bring it.
    source = await AutoTransport(arena, manifest.parts[part].host, _nobody, None).open(manifest, part)
    if isinstance(source, Unavailable):
        return f"is not in the memory of this host ({host_name()}): {source.reason}"
    place, right = Placement(manifest.layout, part, out), manifest.parts[part].digests
    done = 0
    try:
        while done < len(place.bounds):
            came = await source.fetch(range(done, min(done + ROUND_CHUNKS, len(place.bounds))), place, Pace())
            if isinstance(came, Unavailable):
                return f"cannot be read: {came.reason}"
            if not came:
                return "has not wholly come to this host yet"
            for chunk, digest in enumerate(came, done):
                if digest != right[chunk]:
                    names = ", ".join(spec.name for spec in tensors_in(manifest.layout, part, chunk))
                    return f"is damaged in the memory of this host: the digest of chunk {chunk} ({names}) differs"
            done += len(came)
    finally:
        await source.close()
    return ""


async def _nobody() -> list[Peer]:
    return []
