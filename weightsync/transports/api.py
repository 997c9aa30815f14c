"""The transport seam: chunks of a version go into a given buffer.

A version that cannot be had is a value with a reason, for it happens in every healthy run (the trainer freed it,
or died); whoever asked then takes a newer one.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Protocol

from headrace.version import PolicyVersion
from weightsync.digests import Pace
from weightsync.manifest import Manifest
from weightsync.placement import Placement


@dataclass(frozen=True, slots=True)
class Unavailable:
    """Why the bytes of a version cannot be had now."""

    reason: str


class Base(Protocol):
    """An older version that is whole on this host, as what a delta is applied to."""

    @property
    def version(self) -> PolicyVersion: ...

    def read(self, part: int, chunk: int, views: list[memoryview]) -> None:
        """Copy one chunk of it. Any thread."""
        ...


class Source(Protocol):
    """One part of one version. Once opened it stays readable on its own host, whoever frees the version."""

    async def fetch(self, chunks: range, out: Placement, pace: Pace) -> list[bytes] | Unavailable:
        """Bring these chunks, or the first of them, into their places.

        Answers the digest of each chunk that came, computed from the bytes that arrived; it is the caller who
        compares them with the sealed manifest. Fewer than asked, but at least one: the version is still being
        published, or came slowly. None came within about a second: an empty list, ask again. After Unavailable, or
        when cancelled, the places of these chunks are undefined.
        """
        ...

    async def close(self) -> None:
        """Let the bytes go. Idempotent."""
        ...


class Transport(Protocol):
    @property
    def kind(self) -> str: ...

    async def open(self, manifest: Manifest, part: int, base: Base | None = None) -> Source | Unavailable:
        """`base` is offered for a delta; a transport may take the whole version instead.

        Raises WeightError when this transport can never reach the part's host.
        """
        ...

    async def close(self) -> None:
        """Let connections and threads go. Idempotent."""
        ...


async def ended(future: asyncio.Future[Any]) -> None:
    """Also when this is cancelled once more: until then a thread may write into the caller's buffer."""
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            continue
