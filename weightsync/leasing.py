"""Leases: on a version for as long as it is read, and on what the next delta is based on.

Of the latter the holder's name begins with `BASE`. It asks for the version only as long as there is room: where a
trainer has none for its next version, it frees those first, and the next delta is then a full version.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence

from broker.api import WeightsPort
from headrace.version import PolicyVersion

BASE = "base of "


def exporter(host: str, process: str) -> str:
    """The holder's name of a command on this host that exports a version; it gives no heartbeat."""
    return f"export-{host}-{process}"


def read(leased: Mapping[PolicyVersion, Sequence[str]]) -> set[PolicyVersion]:
    """Those of leased versions that somebody reads now."""
    return {version for version, holders in leased.items() if not all(name.startswith(BASE) for name in holders)}


@contextlib.asynccontextmanager
async def leased(port: WeightsPort, version: PolicyVersion, holder: str, lease_s: float) -> AsyncIterator[None]:
    """Held from the begin, renewed at a quarter of its time, released at the end."""
    await port.lease(version, holder, lease_s)
    done = asyncio.Event()
    renewing = asyncio.create_task(_renew(port, version, holder, lease_s, done), name=f"lease {version}")
    try:
        yield
    finally:
        # Not by cancelling: a cancellation that meets the end of a send is lost (asyncio.wait_for, Python 3.11).
        done.set()
        await renewing
        await port.release(version, holder)


async def _renew(port: WeightsPort, version: PolicyVersion, holder: str, lease_s: float, done: asyncio.Event) -> None:
    while not done.is_set():
        try:
            async with asyncio.timeout(lease_s / 4):
                await done.wait()
        except TimeoutError:
            await port.lease(version, holder, lease_s)
