"""Between hosts: chunks come over TCP from the host that published them, or from any that has them already.

Each fetch runs in a thread of the transport, which waits as `weightsync/bulk/download.py` says. The event loop waits
for that thread; a fetch that is cancelled ends it first, so that nothing writes into a buffer that is used again.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

from broker.api import Peer
from weightsync.bulk.deltas import DeltaCache
from weightsync.bulk.download import Download
from weightsync.bulk.parents import Downloads, TcpStats
from weightsync.digests import Pace
from weightsync.manifest import Manifest
from weightsync.placement import Placement
from weightsync.transports.api import Base, Unavailable, ended

THREADS = 8


def bulk_addresses(peers: Iterable[Peer]) -> dict[str, str]:
    """Hosts to where their weight services serve, as their heartbeats say."""
    found = {}
    for peer in peers:
        address = peer.state.get("bulk")
        if peer.role == "weights" and peer.alive and isinstance(address, str) and address:
            found[peer.host] = address
    return found


class TcpTransport:
    """Of one process."""

    kind = "tcp"

    def __init__(
        self,
        addresses: Callable[[], Mapping[str, str]],
        secret: bytes,
        run_id: str,
        *,
        host: str,
        address: str = "",
        codec: str = "auto",
        deltas: DeltaCache | None = None,
        connect_s: float = 2.0,
        stall_s: float = 2.0,
        patience_s: float = 30.0,
    ) -> None:
        """`addresses` says, without waiting, which hosts have a bulk server where; `address` is this process's own.

        `codec` is how versions come of which the base is here: "auto", "raw", "sparse-ulp" or "sparse-abs".
        `deltas` is what the bulk server of this process keeps: those that come here go out from there as they are.
        """
        name = f"{host}-{os.getpid()}-{secrets.token_hex(4)}"
        self._downloads = Downloads(
            addresses, secret, run_id, name, host, address, codec, deltas,
            connect_s=connect_s, stall_s=stall_s, patience_s=patience_s,
        )  # fmt: skip
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="tcp-fetch")

    async def open(self, manifest: Manifest, part: int, base: Base | None = None) -> TcpSource | Unavailable:
        """Who has it is found out by the first fetch."""
        if not set(self._downloads.addresses().values()) - {self._downloads.address}:
            host = manifest.parts[part].host
            return Unavailable(f"no weight service has said where it serves what lies on host {host}")
        return TcpSource(Download(self._downloads, manifest, part, base), self._threads)

    @property
    def downloads(self) -> Downloads:
        """What all its downloads share."""
        return self._downloads

    def stats(self) -> TcpStats:
        return self._downloads.stats

    async def close(self) -> None:
        """After its sources."""
        self._downloads.close()
        await asyncio.to_thread(self._threads.shutdown, wait=True)


class TcpSource:
    def __init__(self, download: Download, threads: ThreadPoolExecutor) -> None:
        self._download = download
        self._threads = threads
        self._closed = False

    async def fetch(self, chunks: range, out: Placement, pace: Pace) -> list[bytes] | Unavailable:
        loop = asyncio.get_running_loop()
        # A pool's thread holds its arguments a moment longer than the call; `out` may be unmapped by then.
        box = [out]
        self._download.begin()
        fetching = loop.run_in_executor(self._threads, self._fetch, chunks, box, pace)
        try:
            return await asyncio.shield(fetching)
        except asyncio.CancelledError:
            self._download.cancel()
            await ended(fetching)
            raise

    def _fetch(self, chunks: range, box: list[Placement], pace: Pace) -> list[bytes] | Unavailable:
        return self._download.fetch(chunks, box.pop(), pace)

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            await asyncio.get_running_loop().run_in_executor(self._threads, self._download.close)
