"""Between hosts by torch.distributed: chunks go from a process beside the origin's weight service to one beside this.

Who has what is asked, and answered with the digest of each chunk, on an authenticated connection to the bulk server, as
over TCP (`weightsync/bulk/`); only the bytes take another way. That connection and the two processes are a pair, which
is kept from version to version. Only the host that published a version is asked, always for full chunks.

Wait graph. `open` waits until there is a pair with that host: START_S and JOIN_S at most, once, and then not again for
`AGAIN_S` where it failed. A fetch waits for the next header for `stall_s`, and for a chunk as much longer as it is
large. Where a pair fails, its process is killed, one line is logged, and what is missing comes over TCP.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from headrace.errors import WeightError, WireError
from weightsync.bulk.client import Connection
from weightsync.bulk.download import ROUND_S, Download
from weightsync.bulk.frames import Get, Status, header_fault
from weightsync.bulk.pairs import JOIN_S, START_S, PairBroken, ReceivingEnd
from weightsync.bulk.parents import Downloads, TcpStats
from weightsync.digests import Pace, digest_of
from weightsync.manifest import Manifest
from weightsync.placement import Placement
from weightsync.transports.api import Base, Source, Unavailable, ended
from weightsync.transports.tcp import TcpSource, TcpTransport

log = logging.getLogger(__name__)

AGAIN_S = 60.0
"""After a failure with a host, TCP does for so long."""


class Pair:
    """With one host. For one thread at a time, which has `lock`, but for `cancel`, `close` and `usable`."""

    def __init__(self, address: str, *, connect_s: float, stall_s: float) -> None:
        """Begins to start its process. Raises PairBroken."""
        self.address = address
        self.backend = ""
        self.lock = threading.Lock()
        self._end = ReceivingEnd(stall_s)
        self._connection = Connection(address, connect_s=connect_s, stall_s=stall_s)

    def open(self, secret: bytes, run_id: str, backends: tuple[str, ...]) -> None:
        """Raises OSError, WireError, WeightError."""
        self._connection.open(secret, run_id)
        if not self._end.alive:
            # Cancelled before there was a connection to shut down.
            raise PairBroken("its process has ended")
        offer = self._connection.pair(backends, START_S + JOIN_S)
        if isinstance(offer, str):
            raise PairBroken(f"it refuses: {offer}")
        if offer.backend not in backends:
            raise WireError(f"it offers backend {offer.backend!r}, which was not asked for")
        self._end.join(offer, self._connection.sock)
        self.backend = offer.backend

    @property
    def usable(self) -> bool:
        if not self._end.alive:
            return False
        if not self.lock.acquire(blocking=False):
            return True
        try:
            return self._connection.fresh
        finally:
            self.lock.release()

    @property
    def pid(self) -> int:
        """Of its process here."""
        return self._end.pid

    def chunk(self, at: int, out: Placement, expected: bytes | None, pace: Pace) -> bytes | Status:
        """The digest of the next chunk of what was asked for, once it is in its place, or what is said instead.

        Raises OSError, WireError.
        """
        header = self._connection.header()
        if header.status is not Status.CHUNK:
            return header.status
        first, last = out.bounds[at]
        if fault := header_fault(header, at, last - first, None):
            raise WireError(fault)
        if expected not in (None, header.digest):
            raise WireError(f"chunk {at} is not what the manifest says")
        pace.start()
        views = out.views(at)
        self._end.receive(views, header.nbytes)
        digest = digest_of(views)
        pace.rest()
        if digest != header.digest:
            raise WireError(f"chunk {at} was damaged on the way")
        return digest

    def ask(self, get: Get) -> None:
        """Raises OSError."""
        self._connection.ask(get)

    def cancel(self) -> None:
        """Whatever another thread waits for here fails at once, and the pair is of no more use."""
        self._end.kill()
        self._connection.cancel()

    def close(self) -> None:
        """After whoever uses it, which ends that."""
        self.cancel()
        with self.lock:
            self._end.close()
            self._connection.close()


class PairDownload(Download):
    """By a pair, and otherwise, or once that has failed, as any other."""

    def __init__(
        self, owner: CollectiveTransport, pair: Pair, manifest: Manifest, part: int, base: Base | None
    ) -> None:
        super().__init__(owner.downloads, manifest, part, base)
        self._owner = owner
        self._pair: Pair | None = pair
        self._busy = False

    def fetch(self, chunks: range, out: Placement, pace: Pace) -> list[bytes] | Unavailable:
        if (pair := self._pair) is not None:
            if not pair.lock.acquire(timeout=ROUND_S):
                return []
            self._busy = True
            try:
                came = None if self._cancellation.asked else self._by(pair, chunks, out, pace)
            except (OSError, WireError) as error:
                self._pair = came = None
                self._owner.fails(pair, error, quiet=self._cancellation.asked)
            finally:
                self._busy = False
                pair.lock.release()
            if came is not None:
                self._left.difference_update(range(chunks.start, chunks.start + len(came)))
                return came
        return super().fetch(chunks, out, pace)

    def cancel(self) -> None:
        super().cancel()
        if self._busy and self._pair is not None:
            self._pair.cancel()

    def _by(self, pair: Pair, chunks: range, out: Placement, pace: Pace) -> list[bytes] | None:
        """As `fetch`; None where others should be asked."""
        layout = self._manifest.layout
        nbytes = layout.part_nbytes(self._part)
        pair.ask(Get(self._manifest.version, self._part, nbytes, layout.chunk_bytes, chunks.start, chunks.stop))
        digests: list[bytes] = []
        for at in chunks:
            digest = pair.chunk(at, out, None if self._expected is None else self._expected[at], pace)
            if isinstance(digest, Status):
                return digests if digests or digest is Status.NOT_YET else None
            digests.append(digest)
            start, end = out.bounds[at]
            self._shared.count(full_bytes=end - start)
        return digests


class CollectiveTransport:
    """Of one process. `tcp` stands in where there is no pair."""

    def __init__(self, tcp: TcpTransport, backends: tuple[str, ...]) -> None:
        """`backends` are those that this host has and may use (`pairs.usable_backends`)."""
        self.kind = "collective"
        """With the backend, once there is a pair: "collective-gloo". "tcp" while that stands in."""
        self._tcp = tcp
        self._backends = backends
        self._pairs: dict[str, Pair] = {}
        self._not_before: dict[str, float] = {}
        self._pairing = asyncio.Lock()
        self._threads = ThreadPoolExecutor(8, thread_name_prefix="collective-fetch")

    @property
    def downloads(self) -> Downloads:
        return self._tcp.downloads

    async def open(self, manifest: Manifest, part: int, base: Base | None = None) -> Source | Unavailable:
        """Who has it is found out by the first fetch."""
        address = self.downloads.addresses().get(manifest.parts[part].host, "")
        pair = await self._paired(address) if address else None
        if pair is None:
            self.kind = "tcp"
            return await self._tcp.open(manifest, part, base)
        self.kind = f"collective-{pair.backend}"
        return TcpSource(PairDownload(self, pair, manifest, part, base), self._threads)

    def stats(self) -> TcpStats:
        return self._tcp.stats()

    def fails(self, pair: Pair, error: Exception, *, quiet: bool) -> None:
        """A pair is over. Any thread."""
        pair.cancel()
        if not quiet:
            self.kind = "tcp"
            self._no_pair(pair.address, error)

    async def close(self) -> None:
        """After its sources."""
        async with self._pairing:
            for pair in self._pairs.values():
                await asyncio.to_thread(pair.close)
            self._pairs.clear()
        await asyncio.to_thread(self._threads.shutdown, wait=True)
        await self._tcp.close()

    async def _paired(self, address: str) -> Pair | None:
        """None where there is none now; that was logged."""
        async with self._pairing:
            await self._forget()
            if pair := self._pairs.get(address):
                return pair
            if address in self._not_before:
                return None
            shared = self.downloads
            try:
                pair = Pair(address, connect_s=shared.connect_s, stall_s=shared.stall_s)
            except PairBroken as error:
                self._no_pair(address, error)
                return None
            if reason := await self._open(pair):
                self._no_pair(address, reason)
                return None
            log.info("weights come from %s by collective, backend %s", address, pair.backend)
            self._pairs[address] = pair
            return pair

    async def _forget(self) -> None:
        """Pairs that are over, also with hosts that are gone or elsewhere now, and failures that are past."""
        for where, until in self._not_before.copy().items():
            if until <= time.monotonic():
                del self._not_before[where]
        for pair in [pair for pair in self._pairs.values() if not pair.usable]:
            del self._pairs[pair.address]
            await asyncio.to_thread(pair.close)

    async def _open(self, pair: Pair) -> Exception | None:
        """Why it did not open. A task that is cancelled ends that first."""
        opening = asyncio.get_running_loop().run_in_executor(self._threads, self._try_to_open, pair)
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            pair.cancel()
            await ended(opening)
            raise

    def _try_to_open(self, pair: Pair) -> Exception | None:
        try:
            pair.open(self.downloads.secret, self.downloads.run_id, self._backends)
        except (OSError, WireError, WeightError) as error:
            pair.close()
            return error
        return None

    def _no_pair(self, address: str, error: Exception) -> None:
        self._not_before[address] = time.monotonic() + AGAIN_S
        log.warning(
            "weights from %s come over TCP for %g s, not by collective: %s", address, AGAIN_S, str(error) or type(error)
        )
