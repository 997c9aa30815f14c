"""The receiver: runs in the producer and brings its engine to the newest policy version while it decodes.

Wait graph of `run`, the one loop: it waits for a version newer than the engine's (woken by the trainer's announcement
or its seal; at most `block_ms`), for its transport's worker thread (about a second where nothing comes), and for the
engine's commit (woken by the decode loop at its next step boundary). Nobody waits for the receiver, except that a
producer takes no task before `first_version` is set. `stopping` ends it within one block or one round.

A version is staged as soon as it is announced, chunk by chunk as the trainer makes it, and committed only once it is
sealed and each chunk in the back buffer has its digest. Versions that vanished, are damaged or cannot be read are
counted and retried, against the newest one and ever more slowly.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from broker.api import Versions, WeightsPort
from headrace.errors import WireError
from headrace.telemetry.clock import epoch, now
from headrace.version import PolicyVersion
from weightsync.arena import Arena
from weightsync.commits import Commit, ReceiverStats
from weightsync.digests import Pace
from weightsync.leasing import leased
from weightsync.manifest import Layout, Manifest, decode
from weightsync.mapping import MapsVersions, mappable, mapped
from weightsync.placement import Bytes, Placement, tensors_in
from weightsync.staging import ROUND_CHUNKS, backoff_s, given_up, gives_way, next_version
from weightsync.steering import Onward, Steering
from weightsync.transports.api import Transport, Unavailable
from weightsync.transports.shm import ShmTransport

log = logging.getLogger(__name__)

PRESSING_MS = 100
"""Longest wait for a newer version while the engine may soon leave its own, or an earlier one be wanted."""


class StagingEngine(Protocol):
    """What the receiver asks of an engine; `producers.engines.api.Engine` has it."""

    @property
    def version(self) -> PolicyVersion | None: ...

    def back_buffer(self, layout: Layout) -> Bytes: ...

    async def commit(self, version: PolicyVersion) -> float: ...


class _Outcome(enum.Enum):
    COMMITTED = enum.auto()
    SKIPPED = enum.auto()
    VANISHED = enum.auto()
    DAMAGED = enum.auto()
    REFUSED = enum.auto()
    STOPPED = enum.auto()


class Receiver:
    """Keeps one engine on the newest version that this producer can stage."""

    def __init__(
        self,
        port: WeightsPort,
        engine: StagingEngine,
        holder: str,
        host: str,
        *,
        run_id: str,
        lease_s: float = 10.0,
        block_ms: int = 1000,
        share: float = 0.5,
        round_chunks: int = ROUND_CHUNKS,
        transport: Transport | None = None,
        in_place: Arena | None = None,
        on_commit: Callable[[Commit], None] | None = None,
        on_head: Callable[[PolicyVersion], None] | None = None,
        steering: Steering | None = None,
    ) -> None:
        """`holder` names this producer in leases; `share` of the wall time is copied or hashed while staging;
        `in_place`: where an engine that can reads versions of this host, instead of a copy;
        after each `round_chunks` it looks for a newer head. `on_head` is told of each newer head, before it is staged.
        `steering` may hold it on a version, and send it back to an earlier one; without, it follows the newest.

        Raises WeightError when there is no folder for segments.
        """
        self._port = port
        self._engine = engine
        self._holder = holder
        self._run_id = run_id
        self._lease_s = lease_s
        self._block_ms = block_ms
        self._pace = Pace(share)
        self._round_chunks = round_chunks
        self._transport = transport or ShmTransport(host)
        self._host = host
        self._in_place = in_place
        self._on_commit = on_commit
        self._on_head = on_head
        self._steering = steering or Onward()
        self._visited: PolicyVersion | None = None  # the earlier version that is being staged now
        self._versions = Versions()
        self._stats = ReceiverStats()
        self._skips_in_a_row = 0
        self.first_version = asyncio.Event()
        """Set at the first commit, for good."""

    def stats(self) -> ReceiverStats:
        return self._stats

    async def ready(self) -> None:
        """Wait for the first commit; bounded by whoever cancels it."""
        await self.first_version.wait()

    async def run(self, stopping: asyncio.Event) -> None:
        """Follow the head until `stopping` is set.

        Raises WeightError when the run's versions can never be used here (another host, a layout that does not fit
        the engine), EngineError, BrokerUnavailable.
        """
        failed: PolicyVersion | None = None
        failures = 0
        while not stopping.is_set():
            if await self._visit(stopping):
                continue
            block_ms = self._block_ms if failed is None else min(self._block_ms, int(backoff_s(failures) * 1000) + 1)
            block_ms = min(block_ms, PRESSING_MS) if self._steering.pressing else block_ms
            version = self._wanted(failed)
            if version is None:
                await self._look(block_ms)
                version = self._wanted(failed)
            if version is None:
                # After a failure the same version is tried again once its time has come.
                failed = None
                continue
            outcome = await self._take(version, stopping)
            if outcome in (_Outcome.VANISHED, _Outcome.DAMAGED, _Outcome.REFUSED):
                failed, failures = version, failures + 1
            else:
                failed, failures = None, 0

    async def _visit(self, stopping: asyncio.Event) -> bool:
        """Bring an earlier version into the engine, where one is wanted; whether one was."""
        version = self._steering.visit()
        if version is None:
            return False
        self._visited = version
        try:
            outcome = await self._take(version, stopping)
        finally:
            self._visited = None
        if outcome not in (_Outcome.COMMITTED, _Outcome.STOPPED):
            self._steering.unavailable(version)
        return True

    def _wanted(self, failed: PolicyVersion | None) -> PolicyVersion | None:
        return next_version(self._versions, self._engine.version, failed)

    async def _look(self, block_ms: int = 0) -> Versions:
        """What there is now, or after something changed; a newer head is told."""
        before, self._versions = self._versions, await self._port.wait_versions(self._versions, block_ms)
        head = self._versions.head
        if head is not None and (before.head is None or head > before.head) and self._on_head is not None:
            self._on_head(head)
        return self._versions

    async def _take(self, version: PolicyVersion, stopping: asyncio.Event) -> _Outcome:
        """Bring one version into the engine, under a lease, and count how it went."""
        async with leased(self._port, version, self._holder, self._lease_s):
            outcome = await self._read(version, stopping)
        if outcome is _Outcome.SKIPPED:
            self._skips_in_a_row += 1
        elif outcome is _Outcome.COMMITTED:
            self._skips_in_a_row = 0
        self._count(outcome)
        return outcome

    async def _read(self, version: PolicyVersion, stopping: asyncio.Event) -> _Outcome:
        manifest = await self._manifest(version)
        if isinstance(manifest, _Outcome):
            return manifest
        if self._in_place is not None and isinstance(self._engine, MapsVersions) and mappable(manifest, self._host):
            return await self._map(self._in_place, self._engine, manifest, stopping)
        start = time.perf_counter()
        out = self._engine.back_buffer(manifest.layout)
        staged: list[list[bytes]] = []
        for part in range(manifest.layout.parts):
            digests = await self._stage(manifest, part, out, stopping)
            if isinstance(digests, _Outcome):
                return digests
            staged.append(digests)
        fetched = time.perf_counter()
        sealed = await self._sealed(manifest, stopping)
        if isinstance(sealed, _Outcome):
            return sealed
        for part, digests in enumerate(staged):
            if failed := await self._mend(sealed, part, digests, out, stopping):
                return failed
        return await self._commit(sealed, manifest.layout.nbytes, start, fetched, stopping)

    async def _map(self, arena: Arena, engine: MapsVersions, manifest: Manifest, stopping: asyncio.Event) -> _Outcome:
        """Take a version of this host in where it lies, once it is sealed."""
        sealed = await self._sealed(manifest, stopping)
        if isinstance(sealed, _Outcome):
            return sealed
        start = time.perf_counter()
        data = await asyncio.to_thread(mapped, arena, sealed, self._pace)
        if isinstance(data, Unavailable):
            log.info("weight version %s vanished: %s", manifest.version, data.reason)
            return _Outcome.VANISHED
        if data is None:
            return _Outcome.DAMAGED
        engine.map(manifest.layout, data)
        return await self._commit(sealed, 0, start, start, stopping)

    async def _commit(
        self, sealed: Manifest, nbytes: int, start: float, fetched: float, stopping: asyncio.Event
    ) -> _Outcome:
        """What is staged and verified becomes the engine's version; `nbytes` were brought for it."""
        verified = time.perf_counter()
        if kept := await self._leave(sealed.version, stopping):
            return kept
        commit_s = await self._engine.commit(sealed.version)
        seconds = fetched - start, verified - fetched, commit_s, time.time() - sealed.sealed_s
        times = sealed.sealed_s, epoch(start), epoch(verified), now()
        self._book(Commit(sealed.version, nbytes, *seconds, *times))
        return _Outcome.COMMITTED

    async def _leave(self, version: PolicyVersion, stopping: asyncio.Event) -> _Outcome | None:
        """Wait until the engine may leave its version. None once it may go to this one, which is whole by now."""
        while not self._steering.leaves():
            if stopping.is_set():
                return _Outcome.STOPPED
            head = (await self._look(PRESSING_MS)).head
            if version != self._visited and head is not None and head > version:
                return _Outcome.SKIPPED
        return None

    async def _manifest(self, version: PolicyVersion) -> Manifest | _Outcome:
        data = await self._port.manifest(version)
        if data is None:
            return _Outcome.VANISHED
        try:
            manifest = decode(data)
        except WireError as error:
            log.warning("manifest of weight version %s is refused: %s", version, error)
            return _Outcome.REFUSED
        if manifest.version != version or manifest.run_id != self._run_id:
            log.warning(
                "manifest under version %s of run %s is refused: it is version %s of run %r",
                version, self._run_id, manifest.version, manifest.run_id,
            )  # fmt: skip
            return _Outcome.REFUSED
        return manifest

    async def _stage(
        self, manifest: Manifest, part: int, out: Bytes, stopping: asyncio.Event
    ) -> list[bytes] | _Outcome:
        """Bring one part into the back buffer; the digest of each chunk as it arrived."""
        version, place = manifest.version, Placement(manifest.layout, part, out)
        source = await self._transport.open(manifest, part)
        if isinstance(source, Unavailable):
            log.info("weight version %s vanished: %s", version, source.reason)
            return _Outcome.VANISHED
        digests: list[bytes] = []
        try:
            while (first := len(digests)) < len(place.bounds):
                if stopping.is_set():
                    return _Outcome.STOPPED
                share = (part + first / len(place.bounds)) / manifest.layout.parts
                if share and await self._gives_way(manifest, share):
                    return _Outcome.SKIPPED
                last = min(first + self._round_chunks, len(place.bounds))
                came = await source.fetch(range(first, last), place, self._pace)
                if isinstance(came, Unavailable):
                    log.info("weight version %s vanished while it was staged: %s", version, came.reason)
                    return _Outcome.VANISHED
                if not came and (late := _waits_in_vain(version, await self._look())):
                    return late
                digests += came
        finally:
            await source.close()
        return digests

    async def _sealed(self, manifest: Manifest, stopping: asyncio.Event) -> Manifest | _Outcome:
        """The same version's manifest once it is sealed."""
        while not manifest.sealed:
            if stopping.is_set():
                return _Outcome.STOPPED
            versions = self._versions
            if versions.head is None or versions.head < manifest.version:
                versions = await self._look(self._block_ms)
            if given_up(manifest.version, versions):
                return _Outcome.VANISHED
            if versions.head is not None and versions.head >= manifest.version:
                sealed = await self._manifest(manifest.version)
                if isinstance(sealed, _Outcome):
                    return sealed
                if not sealed.sealed:
                    log.info("weight version %s was never sealed, %s is", manifest.version, versions.head)
                    return _Outcome.VANISHED
                if not _same(manifest, sealed):
                    log.warning("weight version %s was sealed as another one than it was begun", manifest.version)
                    return _Outcome.REFUSED
                manifest = sealed
        return manifest

    async def _mend(
        self, manifest: Manifest, part: int, digests: list[bytes], out: Bytes, stopping: asyncio.Event
    ) -> _Outcome | None:
        """Fetch once more what does not have its digest. None when all is as it must be."""
        place = Placement(manifest.layout, part, out)
        right = manifest.parts[part].digests
        for chunk in [chunk for chunk, pair in enumerate(zip(digests, right, strict=True)) if pair[0] != pair[1]]:
            names = ", ".join(spec.name for spec in tensors_in(manifest.layout, part, chunk))
            log.warning("weight version %s: chunk %d (%s) is damaged, fetched again", manifest.version, chunk, names)
            source = await self._transport.open(manifest, part)
            if isinstance(source, Unavailable):
                return _Outcome.VANISHED
            came: list[bytes] | Unavailable = []
            try:
                while came == []:
                    if stopping.is_set():
                        return _Outcome.STOPPED
                    came = await source.fetch(range(chunk, chunk + 1), place, self._pace)
                    if came == [] and (late := _waits_in_vain(manifest.version, await self._look())):
                        return late
            finally:
                await source.close()
            if isinstance(came, Unavailable):
                return _Outcome.VANISHED
            if came != [right[chunk]]:
                return _Outcome.DAMAGED
        return None

    async def _gives_way(self, manifest: Manifest, staged: float) -> bool:
        """A version that was not sealed when it was begun to be staged gives way however much of it is there."""
        if manifest.version == self._visited:
            return False
        head = (await self._look()).head
        return gives_way(manifest.version, head, staged if manifest.sealed else 0.0, self._skips_in_a_row)

    def _book(self, commit: Commit) -> None:
        stats = self._stats
        self._stats = replace(
            stats,
            commits=stats.commits + 1,
            staged_bytes=stats.staged_bytes + commit.nbytes,
            fetch_s=stats.fetch_s + commit.fetch_s,
            verify_s=stats.verify_s + commit.verify_s,
            commit_s=stats.commit_s + commit.commit_s,
            last_latency_s=commit.latency_s,
        )
        self.first_version.set()
        if self._on_commit is not None:
            self._on_commit(commit)

    def _count(self, outcome: _Outcome) -> None:
        stats = self._stats
        match outcome:
            case _Outcome.SKIPPED:
                self._stats = replace(stats, skipped=stats.skipped + 1)
            case _Outcome.VANISHED:
                self._stats = replace(stats, vanished=stats.vanished + 1)
            case _Outcome.DAMAGED:
                self._stats = replace(stats, damaged=stats.damaged + 1)
            case _Outcome.REFUSED:
                self._stats = replace(stats, refused=stats.refused + 1)


def _waits_in_vain(version: PolicyVersion, versions: Versions) -> _Outcome | None:
    """Nothing came for a while: whether something else is the better thing to wait for."""
    if versions.head is not None and versions.head > version:
        return _Outcome.SKIPPED
    return _Outcome.VANISHED if given_up(version, versions) else None


def _same(begun: Manifest, sealed: Manifest) -> bool:
    """Whether both are of the same bytes."""
    places = [(part.host, part.segment) for part in begun.parts]
    return begun.layout == sealed.layout and places == [(part.host, part.segment) for part in sealed.parts]
