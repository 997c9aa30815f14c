"""The receiver: runs in the producer and brings its engine to the newest policy version while it decodes.

Wait graph of `run`, the one loop: it waits for a head newer than the engine's version (woken by the trainer's
publish; at most `block_ms`), for its transport's worker thread (bounded by the model's size and the pace), and for
the engine's commit (woken by the decode loop at its next step boundary). Nobody waits for the receiver, except that
a producer takes no task before `first_version` is set. `stopping` ends it within one block or one round.

A version is committed only when it was sealed and every tensor in the back buffer has its digest. Versions that
vanished, are damaged or cannot be read are counted and retried, against the newest head and ever more slowly.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Protocol

from broker.api import WeightsPort
from headrace.errors import WireError
from headrace.version import PolicyVersion
from weightsync.arena import Bytes
from weightsync.digests import Pace, first_mismatch
from weightsync.manifest import Layout, Manifest, decode
from weightsync.staging import ROUND_BYTES, backoff_s, gives_way, rounds
from weightsync.transports.api import Source, Transport, Unavailable
from weightsync.transports.shm import ShmTransport

log = logging.getLogger(__name__)


class StagingEngine(Protocol):
    """What the receiver asks of an engine; `producers.engines.api.Engine` has it."""

    @property
    def version(self) -> PolicyVersion | None: ...

    def back_buffer(self, layout: Layout) -> Bytes: ...

    async def commit(self, version: PolicyVersion) -> float: ...


@dataclass(frozen=True, slots=True)
class Commit:
    """One version's way into the engine. Seconds each."""

    version: PolicyVersion
    nbytes: int
    fetch_s: float
    verify_s: float
    commit_s: float
    """How long decoding stood still, as the engine says."""
    latency_s: float
    """From the seal to the end of the commit; exact on one host, else off by the difference of the clocks."""


@dataclass(frozen=True, slots=True)
class ReceiverStats:
    """Counters since start; a reader takes differences."""

    commits: int = 0
    staged_bytes: int = 0
    fetch_s: float = 0.0
    verify_s: float = 0.0
    commit_s: float = 0.0
    last_latency_s: float = 0.0
    skipped: int = 0
    """Versions whose staging was dropped for a newer one."""
    vanished: int = 0
    """Versions that were freed before or while they were read."""
    damaged: int = 0
    """Versions with a digest that did not match; never committed."""
    refused: int = 0
    """Manifests that are not valid, not sealed, or not those of this run and version."""


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
        round_bytes: int = ROUND_BYTES,
        transport: Transport | None = None,
        on_commit: Callable[[Commit], None] | None = None,
        on_head: Callable[[PolicyVersion], None] | None = None,
    ) -> None:
        """`holder` names this producer in leases; `share` of the wall time is copied or hashed while staging;
        after each `round_bytes` it looks for a newer head. `on_head` is told of each newer head, before it is staged.

        Raises WeightError when there is no folder for segments.
        """
        self._port = port
        self._engine = engine
        self._holder = holder
        self._run_id = run_id
        self._lease_s = lease_s
        self._block_ms = block_ms
        self._pace = Pace(share)
        self._round_bytes = round_bytes
        self._transport = transport or ShmTransport(host)
        self._on_commit = on_commit
        self._on_head = on_head
        self._head: PolicyVersion | None = None
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
            block_ms = self._block_ms if failed is None else min(self._block_ms, int(backoff_s(failures) * 1000) + 1)
            head = self._seen(await self._port.wait_head(failed or self._engine.version, block_ms))
            failed = None
            if head is None or not self._wants(head):
                continue
            outcome = await self._take(head, stopping)
            if outcome in (_Outcome.VANISHED, _Outcome.DAMAGED, _Outcome.REFUSED):
                failed, failures = head, failures + 1
            else:
                failures = 0

    def _wants(self, head: PolicyVersion) -> bool:
        return self._engine.version is None or head > self._engine.version

    async def _take(self, version: PolicyVersion, stopping: asyncio.Event) -> _Outcome:
        """Bring one version into the engine, under a lease, and count how it went."""
        async with self._leased(version):
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
        source = await self._transport.open(manifest)
        if isinstance(source, Unavailable):
            log.info("weight version %s vanished: %s", version, source.reason)
            return _Outcome.VANISHED
        try:
            return await self._stage(manifest, source, stopping)
        finally:
            await source.close()

    async def _manifest(self, version: PolicyVersion) -> Manifest | _Outcome:
        data = await self._port.manifest(version)
        if data is None:
            return _Outcome.VANISHED
        try:
            manifest = decode(data)
        except WireError as error:
            log.warning("manifest of weight version %s is refused: %s", version, error)
            return _Outcome.REFUSED
        if not manifest.sealed or manifest.version != version or manifest.run_id != self._run_id:
            log.warning(
                "manifest under version %s of run %s is refused: it is version %s of run %r, %s",
                version, self._run_id, manifest.version, manifest.run_id, "sealed" if manifest.sealed else "not sealed",
            )  # fmt: skip
            return _Outcome.REFUSED
        return manifest

    async def _stage(self, manifest: Manifest, source: Source, stopping: asyncio.Event) -> _Outcome:
        """Fetch, verify, commit."""
        layout = manifest.layout
        start = time.perf_counter()
        out = self._engine.back_buffer(layout)
        for first, last in rounds(layout.nbytes, self._round_bytes):
            if stopping.is_set():
                return _Outcome.STOPPED
            if first and await self._gives_way(manifest.version, first, layout.nbytes):
                return _Outcome.SKIPPED
            if gone := await source.fetch([(first, last)], out, self._pace):
                log.info("weight version %s vanished while it was staged: %s", manifest.version, gone.reason)
                return _Outcome.VANISHED
        fetched = time.perf_counter()
        bad = await asyncio.to_thread(first_mismatch, layout, manifest.digests, out, self._pace)
        verified = time.perf_counter()
        if bad is not None:
            log.warning("weight version %s is damaged: the digest of tensor %s differs", manifest.version, bad.name)
            return _Outcome.DAMAGED
        commit_s = await self._engine.commit(manifest.version)
        self._book(
            Commit(
                version=manifest.version,
                nbytes=layout.nbytes,
                fetch_s=fetched - start,
                verify_s=verified - fetched,
                commit_s=commit_s,
                latency_s=time.time() - manifest.sealed_s,
            )
        )
        return _Outcome.COMMITTED

    async def _gives_way(self, version: PolicyVersion, staged: int, nbytes: int) -> bool:
        return gives_way(version, self._seen(await self._port.head()), staged, nbytes, self._skips_in_a_row)

    def _seen(self, head: PolicyVersion | None) -> PolicyVersion | None:
        """The head, told when it is a newer one."""
        if head is not None and (self._head is None or head > self._head):
            self._head = head
            if self._on_head is not None:
                self._on_head(head)
        return head

    @contextlib.asynccontextmanager
    async def _leased(self, version: PolicyVersion) -> AsyncIterator[None]:
        """Hold a lease on the version, renewed at a quarter of its time, released at the end."""
        await self._port.lease(version, self._holder, self._lease_s)
        read = asyncio.Event()
        renewing = asyncio.create_task(self._renew(version, read), name=f"lease {version}")
        try:
            yield
        finally:
            # Not by cancelling: a cancellation that meets the end of a send is lost (asyncio.wait_for, Python 3.11).
            read.set()
            await renewing
            await self._port.release(version, self._holder)

    async def _renew(self, version: PolicyVersion, read: asyncio.Event) -> None:
        while not read.is_set():
            try:
                await asyncio.wait_for(read.wait(), self._lease_s / 4)
            except TimeoutError:
                await self._port.lease(version, self._holder, self._lease_s)

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
