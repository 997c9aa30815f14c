"""The mirror: brings the versions that were published on other hosts into this host's shared memory.

Each part goes into a segment of its own, chunk by chunk. A chunk that arrived and matches is ready at once: for the
producers of this host, and for other hosts' mirrors, which this host's bulk server sends it to while the rest comes.

Wait graph of `pull`: it waits for the transport (bounded as `weightsync/bulk/download.py` says), and, once all chunks
of an unsealed version are there, for its seal (woken by the trainer's publish; at most `block_ms` between two looks).
After each round of chunks it looks for a newer version and at `stopping`. Nobody waits for the mirror, except
producers of this host, each for at most a second at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass
from typing import Literal

import numpy as np

from broker.api import Versions, WeightsPort
from headrace.errors import WeightError, WireError
from headrace.telemetry.clock import epoch
from headrace.version import PolicyVersion
from weightsync.arena import Arena, NewSegment
from weightsync.bulk.shelf import HeldBase, Shelf
from weightsync.digests import Pace
from weightsync.manifest import Layout, Manifest, decode
from weightsync.placement import Placement
from weightsync.staging import ROUND_CHUNKS, given_up, gives_way
from weightsync.transports.api import Source, Unavailable
from weightsync.transports.collective import CollectiveTransport
from weightsync.transports.tcp import TcpTransport

log = logging.getLogger(__name__)

Kind = Literal["held", "skipped", "vanished", "refused", "stopped"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How pulling a version ended."""

    kind: Kind
    """"held": all parts are in this host's memory, verified and sealed. "skipped": dropped for a newer version."""
    version: PolicyVersion
    reason: str = ""
    nbytes: int = 0
    """Of the parts that were pulled."""
    full_bytes: int = 0
    """As full chunks over the wire."""
    delta_bytes: int = 0
    """As deltas over the wire."""
    transport: str = ""
    """How the newest part came."""
    seconds: float = 0.0
    latency_s: float = 0.0
    """From the seal to the end; off by the difference of the clocks of two hosts."""
    ended_at: float = 0.0
    """Seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Of the version that is being pulled."""

    version: PolicyVersion
    part: int
    chunks: int
    of: int


class _Ends(Exception):
    """A pull ends without the version."""

    def __init__(self, kind: Kind, reason: str = "") -> None:
        self.kind, self.reason = kind, reason


class Mirror:
    """Of one run on one host. One pull at a time."""

    def __init__(
        self,
        arena: Arena,
        transport: TcpTransport | CollectiveTransport,
        port: WeightsPort,
        run_id: str,
        host: str,
        *,
        stopping: asyncio.Event,
        block_ms: int = 1000,
        share: float = 1.0,
    ) -> None:
        """`share` of the wall time is copied or hashed while chunks come."""
        self.progress: Progress | None = None
        self._arena = arena
        self._shelf = Shelf(arena, run_id)
        self._transport = transport
        self._port = port
        self._run_id = run_id
        self._host = host
        self._stopping = stopping
        self._block_ms = block_ms
        self._pace = Pace(share)
        self._versions = Versions()
        self._skips_in_a_row = 0
        self._base: PolicyVersion | None = None
        self._spare: tuple[tuple[int, int], NewSegment] | None = None

    def wants(self, manifest: Manifest) -> list[int]:
        """The parts that lie on other hosts, and are not whole in this host's memory."""
        return [
            number
            for number, part in enumerate(manifest.parts)
            if part.host != self._host and not self._shares(manifest, number) and not self._has(manifest, number)
        ]

    def holds(self, manifest: Manifest) -> None:
        """Nothing of this version is wanted: what came from elsewhere is what the next delta can be based on."""
        if any(self._has(manifest, number) for number, part in enumerate(manifest.parts) if part.host != self._host):
            self._base = manifest.version

    @property
    def base(self) -> PolicyVersion | None:
        """What the next delta will be based on."""
        return self._base

    def needed(self) -> set[PolicyVersion]:
        """What may not be freed whoever else needs it: the version that comes, and the base of the next delta."""
        coming = {self.progress.version} if self.progress else set()
        return coming | ({self._base} if self._base else set())

    async def pull(self, manifest: Manifest) -> Outcome:
        """Bring one version here, sealed or not. It should be leased until this returns.

        Raises WeightError when there is no memory for it, and what the port raises.
        """
        start, before = time.perf_counter(), self._transport.stats()
        kind: Kind = "held"
        reason = ""
        wanted = self.wants(manifest)
        try:
            manifest = await self._pull(manifest, wanted)
        except _Ends as end:
            kind, reason = end.kind, end.reason
            log.info("weight version %s does not come here: %s %s", manifest.version, kind, reason)
        finally:
            self.progress = None
        self._skips_in_a_row = self._skips_in_a_row + 1 if kind == "skipped" else 0
        if kind == "held":
            self._base = manifest.version
        after, ended = self._transport.stats(), time.perf_counter()
        latency_s = time.time() - manifest.sealed_s if manifest.sealed else 0.0
        if kind == "held" and wanted:
            await asyncio.to_thread(self._make_spare, manifest, wanted[0])
        return Outcome(
            kind,
            manifest.version,
            reason,
            nbytes=sum(manifest.layout.part_nbytes(part) for part in wanted),
            full_bytes=after.full_bytes - before.full_bytes,
            delta_bytes=after.delta_bytes - before.delta_bytes,
            transport=self._transport.kind,
            seconds=ended - start,
            latency_s=latency_s,
            ended_at=epoch(ended),
        )

    async def close(self) -> None:
        """After the last pull."""
        spare, self._spare = self._spare, None
        if spare is not None:
            await asyncio.to_thread(spare[1].discard)

    async def _pull(self, manifest: Manifest, wanted: list[int]) -> Manifest:
        """The sealed manifest, once all is here. Raises _Ends."""
        segments: dict[int, NewSegment] = {}
        came: dict[int, list[bytes]] = {}
        try:
            for part in wanted:
                came[part] = await self._fill(manifest, part, segments)
            manifest = await self._sealed(manifest)
            for part in wanted:
                if tuple(came[part]) != manifest.parts[part].digests:
                    # Whoever sent it vouched for other bytes than the trainer. Now each chunk is judged as it comes.
                    log.warning("weight version %s: part %d is not what its manifest says", manifest.version, part)
                    await asyncio.to_thread(segments.pop(part).discard)
                    came[part] = await self._fill(manifest, part, segments)
                await asyncio.to_thread(segments.pop(part).seal)
        finally:
            for segment in segments.values():
                # The memory goes back with the last view of it.
                await asyncio.to_thread(segment.discard)
        return manifest

    async def _fill(self, manifest: Manifest, part: int, segments: dict[int, NewSegment]) -> list[bytes]:
        """Bring one part into a segment of its own; the digest of each chunk. Raises _Ends."""
        async with contextlib.AsyncExitStack() as stack:
            base = self._whole(manifest, part)
            if base is not None:
                stack.callback(base.close)
            source = await self._transport.open(manifest, part, base)
            if isinstance(source, Unavailable):
                raise _Ends("vanished", source.reason)
            stack.push_async_callback(source.close)
            segments[part] = segment = await self._new(manifest, part)
            return await self._copy(manifest, part, source, segment)

    async def _copy(self, manifest: Manifest, part: int, source: Source, segment: NewSegment) -> list[bytes]:
        layout = Layout((), segment.nbytes, chunk_bytes=manifest.layout.chunk_bytes)
        place = Placement(layout, 0, np.frombuffer(segment.data, np.uint8))
        digests: list[bytes] = []
        of = len(place.bounds)
        waits = False
        while (at := len(digests)) < of:
            self.progress = Progress(manifest.version, part, at, of)
            if waits or at % ROUND_CHUNKS == 0:
                await self._check(manifest, (part + at / of) / manifest.layout.parts, waits)
            # One by one, so that each is sent on at once; the transport reads ahead.
            got = await source.fetch(range(at, at + 1), place, self._pace)
            if isinstance(got, Unavailable):
                raise _Ends("vanished", got.reason)
            segment.grow(got)
            digests += got
            waits = not got
        return digests

    async def _check(self, manifest: Manifest, staged: float, waits: bool) -> None:
        """Whether to go on, with this share of the version here, or where nothing comes. Raises _Ends."""
        if self._stopping.is_set():
            raise _Ends("stopped")
        self._versions = await self._port.wait_versions(self._versions, 0)
        head = self._versions.head
        if not manifest.sealed and given_up(manifest.version, self._versions):
            raise _Ends("vanished", f"another trainer has begun version {self._versions.coming}")
        # One that is not sealed yet gives way to any newer one that is; if nothing comes of it, however often that was.
        skips = 0 if waits and not manifest.sealed else self._skips_in_a_row
        if gives_way(manifest.version, head, staged if manifest.sealed else 0.0, skips):
            raise _Ends("skipped", f"version {head} is there")

    async def _sealed(self, manifest: Manifest) -> Manifest:
        """The same version's manifest once it is sealed. Raises _Ends."""
        while not manifest.sealed:
            if self._stopping.is_set():
                raise _Ends("stopped")
            if not manifest.sealed and given_up(manifest.version, self._versions):
                raise _Ends("vanished", f"another trainer has begun version {self._versions.coming}")
            head = self._versions.head
            if head is None or head < manifest.version:
                self._versions = await self._port.wait_versions(self._versions, self._block_ms)
                continue
            manifest = await self._manifest_of(manifest)
            if not manifest.sealed:
                raise _Ends("vanished", f"it was never sealed, {head} is")
        return manifest

    async def _manifest_of(self, begun: Manifest) -> Manifest:
        """What the broker says of this version now. Raises _Ends."""
        data = await self._port.manifest(begun.version)
        if data is None:
            raise _Ends("vanished", "its manifest is gone")
        try:
            manifest = decode(data)
        except WireError as error:
            raise _Ends("refused", str(error)) from error
        if (manifest.run_id, manifest.version, manifest.layout) != (begun.run_id, begun.version, begun.layout):
            raise _Ends("refused", "it was sealed as another one than it was begun")
        return manifest

    async def _new(self, manifest: Manifest, part: int) -> NewSegment:
        """Raises WeightError without memory for it."""
        return await asyncio.to_thread(self._create, manifest, part)

    def _create(self, manifest: Manifest, part: int) -> NewSegment:
        version = manifest.version
        for name in self._arena.segments(self._run_id):
            if (name.version, name.part) == (version, part) and not self._arena.lives(name):
                # Begun by a service that died.
                self._arena.remove(name)
        spare, self._spare = self._spare, None
        if spare is not None and spare[0] == _size(manifest, part):
            # Somebody may have cleaned the folder.
            with contextlib.suppress(FileNotFoundError):
                spare[1].begin(self._arena.name(self._run_id, version, part))
                return spare[1]
        elif spare is not None:
            spare[1].discard()
        try:
            return self._arena.create(self._run_id, version, manifest.layout, part)
        except WeightError:
            if not self._arena.sweep(orphan_age_s=0.0, keep_run=self._run_id):
                raise
            return self._arena.create(self._run_id, version, manifest.layout, part)

    def _make_spare(self, manifest: Manifest, part: int) -> None:
        """Memory for the next version, which need not be mapped then. Without any, that one makes its own."""
        if self._spare is None:
            with contextlib.suppress(WeightError):
                segment = self._arena.create(self._run_id, manifest.version, manifest.layout, part, spare=True)
                self._spare = _size(manifest, part), segment

    def _shares(self, manifest: Manifest, part: int) -> bool:
        """Whether the segment itself is in this host's memory, under whatever name its host goes."""
        try:
            segment = self._arena.open(manifest.parts[part].segment, manifest.layout, part)
        except WeightError:
            return False
        if segment is not None:
            segment.close()
        return segment is not None

    def _has(self, manifest: Manifest, part: int) -> bool:
        layout = manifest.layout
        held = self._shelf.whole(manifest.version, part, layout.part_nbytes(part), layout.chunk_bytes)
        if held is not None:
            held.close()
        return held is not None

    def _whole(self, manifest: Manifest, part: int) -> HeldBase | None:
        """What a delta to this version can be applied to."""
        if self._base is None or self._base >= manifest.version:
            return None
        layout = manifest.layout
        held = self._shelf.whole(self._base, part, layout.part_nbytes(part), layout.chunk_bytes)
        return HeldBase(self._base, held, layout.chunk_bytes) if held is not None else None


def _size(manifest: Manifest, part: int) -> tuple[int, int]:
    """What a segment must be of to hold this part."""
    return manifest.layout.part_nbytes(part), manifest.layout.chunk_bytes
