"""A lease on a version for as long as it is read."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from broker.api import WeightsPort
from headrace.version import PolicyVersion


@contextlib.asynccontextmanager
async def leased(port: WeightsPort, version: PolicyVersion, holder: str, lease_s: float) -> AsyncIterator[None]:
    """Held from the begin, renewed at a quarter of its time, released at the end."""
    await port.lease(version, holder, lease_s)
    read = asyncio.Event()
    renewing = asyncio.create_task(_renew(port, version, holder, lease_s, read), name=f"lease {version}")
    try:
        yield
    finally:
        # Not by cancelling: a cancellation that meets the end of a send is lost (asyncio.wait_for, Python 3.11).
        read.set()
        await renewing
        await port.release(version, holder)


async def _renew(port: WeightsPort, version: PolicyVersion, holder: str, lease_s: float, read: asyncio.Event) -> None:
    while not read.is_set():
        try:
            async with asyncio.timeout(lease_s / 4):
                await read.wait()
        except TimeoutError:
            await port.lease(version, holder, lease_s)
