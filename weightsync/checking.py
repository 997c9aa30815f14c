"""Whether a segment holds what its manifest says."""

from __future__ import annotations

import numpy as np

from weightsync.arena import Segment
from weightsync.digests import Pace, digest_of
from weightsync.manifest import Manifest
from weightsync.placement import chunk_bounds, tensors_in


def first_damage(segment: Segment, manifest: Manifest, part: int, pace: Pace) -> str | None:
    """What is wrong with the first chunk that does not have its digest; None where all do."""
    layout = manifest.layout
    scratch = np.empty(layout.chunk_bytes, np.uint8).data
    pace.start()
    for chunk, (start, end) in enumerate(chunk_bounds(layout, part)):
        view = scratch[: end - start]
        segment.read(start, [view])
        if digest_of([view]) != manifest.parts[part].digests[chunk]:
            names = ", ".join(spec.name for spec in tensors_in(layout, part, chunk))
            return f"the digest of chunk {chunk} ({names}) differs"
        pace.rest()
    return None
