"""Picks how a version comes here: out of this host's shared memory where it is there, else from its host.

    where the version's segment is                                           way
    in this host's memory, whoever put it there                              shm
    elsewhere, and a weight service of this host brings it                   shm, once that service has begun
    elsewhere, and this host has no weight service                           tcp, or what `weights.transport` says

Whether two processes share their memory is found out by opening the segment, not by comparing the names of hosts:
containers of one host have names of their own.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable

from broker.api import Peer
from headrace.errors import WeightError
from weightsync.arena import Arena, Segment
from weightsync.digests import Pace
from weightsync.manifest import Manifest
from weightsync.placement import Placement
from weightsync.transports.api import Base, Source, Transport, Unavailable
from weightsync.transports.shm import LOOK_S, WAIT_S, ShmSource

log = logging.getLogger(__name__)


class AutoTransport:
    """Of a producer."""

    def __init__(
        self,
        arena: Arena,
        host: str,
        peers: Callable[[], Awaitable[Iterable[Peer]]],
        remote: Transport | None,
        on_kind: Callable[[str], None] = lambda kind: None,
        *,
        local: bool = True,
    ) -> None:
        """`remote` brings what this host's memory does not have; None where only shared memory is wanted, and without
        `local` it brings everything. `on_kind` is told of each change of the way."""
        self.kind = ""
        self._arena = arena
        self._host = host
        self._peers = peers
        self._remote = remote
        self._on_kind = on_kind
        self._shares = local

    async def open(self, manifest: Manifest, part: int, base: Base | None = None) -> Source | Unavailable:
        """Raises WeightError where nothing can bring it here."""
        theirs = manifest.parts[part].host
        if self._shares and (segment := self._local(manifest, part)):
            self._goes_by("shm", "its segment is in this host's memory")
            return ShmSource(segment)
        peers = await self._peers()
        if self._remote is not None and not self._shares:
            return await self._open_remote(self._remote, "weights.transport says so", manifest, part, base)
        if theirs == self._host:
            return Unavailable(f"segment {manifest.parts[part].segment} is gone")
        if any(peer.role == "weights" and peer.host == self._host and peer.alive for peer in peers):
            self._goes_by("shm", f"the weight service of this host brings it from {theirs}")
            return _Awaited(lambda: self._local(manifest, part))
        if self._remote is None:
            raise WeightError(
                f"weight version {manifest.version} lies on host {theirs!r}, this is {self._host!r} and has no weight "
                'service: start `python -m weightsync` here, or set weights.transport = "auto"'
            )
        why = f"it lies on {theirs}, and this host has no weight service"
        return await self._open_remote(self._remote, why, manifest, part, base)

    async def close(self) -> None:
        if self._remote is not None:
            await self._remote.close()

    async def _open_remote(
        self, remote: Transport, why: str, manifest: Manifest, part: int, base: Base | None
    ) -> Source | Unavailable:
        source = await remote.open(manifest, part, base)
        # Of a transport that another may stand in for, it is known only now.
        self._goes_by(remote.kind, why)
        return source

    def _local(self, manifest: Manifest, part: int) -> Segment | None:
        """The trainer's own segment, or the copy that this host's service makes."""
        names = [manifest.parts[part].segment]
        names += [
            str(name)
            for name in self._arena.segments(manifest.run_id)
            if (name.version, name.part) == (manifest.version, part)
        ]
        for name in names:
            try:
                segment = self._arena.open(name, manifest.layout, part)
            except WeightError as error:
                log.warning("%s", error)
                continue
            if segment is not None:
                return segment
        return None

    def _goes_by(self, kind: str, why: str) -> None:
        if kind != self.kind:
            self.kind = kind
            log.info("weights come by %s: %s", kind, why)
            self._on_kind(kind)


class _Awaited:
    """What the weight service of this host has yet to begin."""

    def __init__(self, find: Callable[[], Segment | None]) -> None:
        self._find = find
        self._source: ShmSource | None = None

    async def fetch(self, chunks: range, out: Placement, pace: Pace) -> list[bytes] | Unavailable:
        until = time.monotonic() + WAIT_S
        while self._source is None and time.monotonic() < until:
            if segment := self._find():
                self._source = ShmSource(segment)
            else:
                # The files of another process: nothing wakes us when it makes one.
                await asyncio.sleep(LOOK_S)
        return [] if self._source is None else await self._source.fetch(chunks, out, pace)

    async def close(self) -> None:
        if self._source is not None:
            await self._source.close()
