"""The transport seam: chunk ranges of a sealed version go into a given buffer.

A version that cannot be had is a value with a reason, for it happens in every healthy run (the trainer freed it,
or died); the receiver then takes a newer one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from weightsync.arena import Bytes
from weightsync.digests import Pace
from weightsync.manifest import Manifest

Range = tuple[int, int]
"""Bytes `start` (included) to `end` (excluded) of the flat layout."""


@dataclass(frozen=True, slots=True)
class Unavailable:
    """Why the bytes of a version cannot be had now."""

    reason: str


class Source(Protocol):
    """The bytes of one version. Once opened they stay readable, whoever frees the version."""

    async def fetch(self, ranges: Sequence[Range], out: Bytes, pace: Pace) -> Unavailable | None:
        """Copy these ranges to the same places of `out`, which is as long as the layout. None when all are there.

        The bytes are not verified. After Unavailable, or when cancelled, `out` is undefined.
        """
        ...

    async def close(self) -> None:
        """Let the bytes go. Idempotent."""
        ...


class Transport(Protocol):
    @property
    def kind(self) -> str: ...

    async def open(self, manifest: Manifest) -> Source | Unavailable:
        """Raises WeightError when this transport can never reach the manifest's host."""
        ...
