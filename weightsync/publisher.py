"""The publisher: runs in the trainer and makes each policy version an immutable segment of this host.

Wait graph.

    who             waits for                                      woken by
    publish         the version before, until it is sealed         sealing, bounded by the model's size and the broker
    publish         the copy of the tensors, in a thread           the thread
    digest thread   the next chunk that is copied whole            the copying thread
    sealing         the digest thread, then the broker             both
    readying        memory for the next version, in a thread       the thread

Nobody waits for a reader: readers hold leases and files, and when those leave no room the version is skipped and
counted. `publish` returns when the tensors may change again; the version is digested, sealed and made the head behind
its back. What went wrong there is raised by the next call.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import msgpack

from broker.api import Fence, WeightsPort
from headrace.errors import BrokerError, Fenced, WeightError
from headrace.hosts import host_name
from headrace.version import PolicyVersion
from weightsync.arena import Arena, NewSegment, SegmentName
from weightsync.filling import Filling, shape_of
from weightsync.leasing import read
from weightsync.manifest import Layout, Manifest, Part, encode
from weightsync.retention import Held, freeable

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

Digests = asyncio.Future[tuple[bytes, ...] | None]
"""Of each chunk; None for a part that was given up."""


@dataclass(frozen=True, slots=True)
class PublisherStats:
    """Counters since start; a reader takes differences."""

    published: int = 0
    skipped: int = 0
    """Versions that were not published because no segment was free."""
    freed: int = 0
    nbytes: int = 0
    """Bytes written into segments."""
    copy_s: float = 0.0
    """Seconds of copying and casting."""
    publish_s: float = 0.0
    """Seconds of `publish` calls that published: what the trainer waited."""
    seal_s: float = 0.0
    """Seconds from the begin of a version to its being the head."""


class Ranks(Protocol):
    """The ranks of one trainer, each of which publishes its part of every version."""

    @property
    def rank(self) -> int: ...

    async def gather(self, mine: bytes) -> list[bytes]:
        """What each rank says at this point, in the order of ranks; all of them say something. A few kilobytes.

        Raises WeightError when one says nothing in time.
        """
        ...


class OneRank:
    rank = 0

    async def gather(self, mine: bytes) -> list[bytes]:
        return [mine]


class Publisher:
    """Publishes the versions of one trainer incarnation, one after the other."""

    def __init__(
        self,
        port: WeightsPort,
        fence: Fence,
        layout: Layout,
        run_id: str,
        max_live_versions: int,
        *,
        host: str | None = None,
        arena: Arena | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """`max_live_versions` bounds the segments of each rank on this host, the one to be filled included; pinned
        versions are not counted.

        Removes what dead trainers of other runs left on this host. Raises WeightError without a folder for segments.
        """
        if max_live_versions < 2:
            raise ValueError(f"max_live_versions = {max_live_versions} leaves no room for a version beside the head")
        self._port = port
        self._fence = fence
        self._layout = layout
        self._run_id = run_id
        self._max_live = max_live_versions
        self._host = host or host_name()
        self._arena = arena or Arena()
        self._ranks = ranks or OneRank()
        self._part = self._ranks.rank
        self._nbytes = layout.part_nbytes(self._part)
        self._stats = PublisherStats()
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="publish")
        self._newest: Manifest | None = None
        self._filling: Filling | None = None
        self._sealing: asyncio.Task[None] | None = None
        self._spare: NewSegment | None = None
        self._closing = False
        self._pins: set[PolicyVersion] = set()
        self._one = asyncio.Lock()
        self._arena.sweep(keep_run=run_id)

    def stats(self) -> PublisherStats:
        return self._stats

    async def publish(self, version: PolicyVersion, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Copy the tensors of the layout into a new segment; behind that, seal it and move the head to it.

        `tensors` has exactly the layout's names, with the shapes of this rank's rows (see `placement`), of any dtype
        and on any device; they may not change until this returns. False when the version was skipped because a rank
        had no free segment, or no memory for one after it had some before.

        Raises WeightError for tensors that do not fit or when there is no memory, Fenced, BrokerUnavailable; also
        what the sealing of the version before raised.
        """
        async with self._one:
            if fault := self._fault(version, tensors):
                raise WeightError(f"weight version {version} cannot be published: {fault}")
            start = time.perf_counter()
            await self._settled()
            segment = await self._segment(version)
            if b"" in await self._ranks.gather(b"" if segment is None else b"room") or segment is None:
                if segment is not None:
                    await asyncio.to_thread(segment.discard)
                self._stats = replace(self._stats, skipped=self._stats.skipped + 1)
                return False
            copy_s, digests, begun = await self._fill(version, segment, dict(tensors))
            self._sealing = asyncio.create_task(self._seal(segment, digests, begun, start), name=f"seal {version}")
            stats = self._stats
            self._stats = replace(
                stats,
                published=stats.published + 1,
                nbytes=stats.nbytes + self._nbytes,
                copy_s=stats.copy_s + copy_s,
                publish_s=stats.publish_s + time.perf_counter() - start,
            )
            return True

    async def sealed(self) -> None:
        """Wait until the newest version is the head. Raises what its sealing raised."""
        async with self._one:
            await self._settled()

    async def announce_again(self) -> None:
        """Say once more what the newest published version is: Redis may have lost it. Raises Fenced."""
        async with self._one:
            await self._settled()
            if self._newest is not None:
                await self._port.publish_head(self._fence, self._newest.version, encode(self._newest))

    def check_head(self) -> None:
        """Raises WeightError where somebody has removed the head's segment: a producer that starts now would wait for
        weights, and this trainer for its groups.
        """
        newest = self._newest
        if newest is None or self._closing or self._arena.has(newest.parts[self._part].segment):
            return
        raise WeightError(
            f"the weights of {newest.version} were removed from {self._arena.folder} by another program "
            "(systemd-logind does so with RemoveIPC=yes once the user has logged out); a trainer that goes on "
            "publishes them again"
        )

    async def close(self) -> None:
        """Unlink all segments of this incarnation that are not pinned. Idempotent; readers keep what they opened."""
        self._closing = True
        if self._filling is not None:
            self._filling.give_up()
        async with self._one:
            if self._sealing is not None:
                await asyncio.wait([self._sealing])
                if error := self._sealing.exception():
                    log.warning("the newest weight version is not sealed: %s", error)
            await asyncio.to_thread(self._threads.shutdown)
            self._drop_spare()
            kept = await self._pinned()
            for name in self._own():
                if name.version.incarnation == self._fence.incarnation and name.version not in kept:
                    await asyncio.to_thread(self._arena.remove, name)

    async def _segment(self, version: PolicyVersion) -> NewSegment | None:
        """Memory for a version; None where there is none now. Raises WeightError where there never was any."""
        if not await self._room():
            log.info("weight version %s is skipped: all %d segments are in use", version, self._max_live)
            return None
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, self._begin, version)
        except WeightError as error:
            if self._newest is None:
                raise
            log.warning("weight version %s is skipped: %s", version, error)
            return None

    async def _fill(
        self, version: PolicyVersion, segment: NewSegment, tensors: dict[str, torch.Tensor]
    ) -> tuple[float, Digests, Manifest]:
        loop = asyncio.get_running_loop()
        self._filling = filling = Filling(segment, self._layout, self._part)
        if self._closing:
            filling.give_up()
        try:
            rows = await self._ranks.gather(msgpack.packb([self._host, segment.name]))
            parts = tuple(Part(*msgpack.unpackb(row)) for row in rows)
            begun = Manifest(version, self._layout, parts, False, self._run_id)
            if self._part == 0:
                await self._port.announce(self._fence, version, encode(begun))
            digests = loop.run_in_executor(self._threads, filling.digest)
            copy_s = await loop.run_in_executor(self._threads, filling.copy, tensors)
        except BaseException:
            filling.give_up()
            segment.discard()
            raise
        return copy_s, digests, begun

    async def _seal(self, segment: NewSegment, digesting: Digests, begun: Manifest, start: float) -> None:
        """Behind the trainer's back: the version becomes the head, what nobody needs any more goes, memory for the
        next one comes."""
        mine = await digesting
        if mine is not None:
            segment.seal()
        digests = [msgpack.unpackb(row) for row in await self._ranks.gather(msgpack.packb(mine))]
        if None in digests:
            segment.discard()
            return
        parts = tuple(replace(part, digests=tuple(row)) for part, row in zip(begun.parts, digests, strict=True))
        manifest = replace(begun, parts=parts, sealed=True, sealed_s=time.time())
        try:
            if self._part == 0:
                await self._port.publish_head(self._fence, manifest.version, encode(manifest))
        except Fenced:
            segment.discard()
            raise
        finally:
            # What a rank frees depends on where the head is.
            await self._ranks.gather(b"")
        self._newest = manifest
        self._stats = replace(self._stats, seal_s=self._stats.seal_s + time.perf_counter() - start)
        await self._free()
        if self._counted() < self._max_live and not self._closing:
            await asyncio.get_running_loop().run_in_executor(self._threads, self._make_spare, manifest.version)

    async def _settled(self) -> None:
        if self._sealing is not None:
            await asyncio.wait([self._sealing])
            sealing, self._sealing = self._sealing, None
            sealing.result()

    def _fault(self, version: PolicyVersion, tensors: Mapping[str, torch.Tensor]) -> str | None:
        if self._closing:
            return "its publisher is closed"
        if version.incarnation != self._fence.incarnation:
            return f"this trainer is incarnation {self._fence.incarnation}"
        if unknown := tensors.keys() - {spec.name for spec in self._layout.tensors}:
            return f"tensor {min(unknown)!r} is not in the layout"
        for spec in self._layout.tensors:
            tensor, shape = tensors.get(spec.name), shape_of(spec, self._part, self._layout.parts)
            if tensor is None:
                return f"tensor {spec.name!r} is missing"
            if tuple(tensor.shape) != shape:
                return f"tensor {spec.name!r} has shape {list(tensor.shape)}, the layout says {list(shape)}"
        return None

    async def _room(self) -> bool:
        if self._counted() >= self._max_live:
            await self._free(bases=False)
        return self._counted() < self._max_live

    def _own(self) -> list[SegmentName]:
        """Rank 0's are also those of ranks that there are no longer."""
        return [
            name
            for name in self._arena.segments(self._run_id)
            if name.part == self._part or (self._part == 0 and name.part >= self._layout.parts)
        ]

    def _counted(self) -> int:
        """Versions that take room."""
        return len({name.version for name in self._own() if name.version not in self._pins})

    async def _pinned(self) -> set[PolicyVersion]:
        """Of the last answer, where there is none now."""
        with contextlib.suppress(BrokerError):
            self._pins = await self._port.pinned()
        return self._pins

    async def _free(self, *, bases: bool = True) -> None:
        """Free what nobody needs; without `bases` also what only the next delta of another host would need."""
        names = self._own()
        # The head last: where Redis is emptied in between there is none, and nothing is freed.
        pinned, leased, head = await self._pinned(), await self._port.leased(), await self._port.head()
        # What an older incarnation has begun will never be sealed, though its trainer may live.
        mine = self._fence.incarnation
        lives = self._arena.lives
        held = [Held(str(name), name.version, name.version.incarnation >= mine and lives(name)) for name in names]
        going = {item.name for item in freeable(held, head, (leased.keys() if bases else read(leased)) | pinned)}
        for name in (name for name in names if str(name) in going):
            # In this order: of a trainer that stops in between others find the segment.
            await self._port.forget(name.version)
            if await asyncio.to_thread(self._arena.remove, name):
                self._stats = replace(self._stats, freed=self._stats.freed + 1)

    def _begin(self, version: PolicyVersion) -> NewSegment:
        """In a thread: the memory of a new version."""
        spare, self._spare = self._spare, None
        if spare is not None:
            # Somebody may have cleaned the folder.
            with contextlib.suppress(FileNotFoundError):
                spare.begin(self._arena.name(self._run_id, version, self._part))
                return spare
        return self._create(version)

    def _make_spare(self, version: PolicyVersion) -> None:
        """In a thread. Without memory for it, the next version has to make its own."""
        try:
            self._spare = self._arena.create(self._run_id, version, self._layout, self._part, spare=True)
        except WeightError as error:
            log.info("no memory is made ready for the next weight version: %s", error)

    def _create(self, version: PolicyVersion) -> NewSegment:
        try:
            return self._arena.create(self._run_id, version, self._layout, self._part)
        except WeightError:
            if not self._arena.sweep(orphan_age_s=0.0, keep_run=self._run_id):
                raise
            return self._arena.create(self._run_id, version, self._layout, self._part)

    def _drop_spare(self) -> None:
        if self._spare is not None:
            self._spare.discard()
            self._spare = None
