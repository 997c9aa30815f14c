"""What every update of a server's weights has: a deadline, a pause, and a knowledge of how far it was when it failed.

A server that was not touched yet goes on with its old version. From the first byte on that it may have loaded, a
failure is `half_way` and leaves it paused: it samples nothing until a whole version is in it, all compared.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from headrace.errors import HeadraceError, WeightError
from weightsync.manifest import Layout

DEADLINE_S = 60.0
"""For a version of no bytes."""
SLOWEST = 50 << 20
"""Bytes per second that an update may be slow; its deadline grows by it."""
RESUME_S = 10.0
"""For a server that was not touched to go on."""


class UpdateFailed(WeightError):
    """The server does not have the version. `half_way`: nor the one that it had, surely, and it stands still."""

    def __init__(self, reason: str, *, half_way: bool) -> None:
        super().__init__(reason)
        self.half_way = half_way


@dataclass(slots=True)
class Way:
    """How far one update is."""

    dirty: bool = False
    """The server may have had a half of something before."""
    touched: bool = False
    """It may have loaded something now, or cannot be brought to go on."""
    by_other_means: bool = False
    """It failed for a reason that other means may not have."""

    @property
    def half_way(self) -> bool:
        return self.dirty or self.touched

    def arrived(self) -> None:
        """The server has a whole version."""
        self.dirty = self.touched = False


@contextlib.asynccontextmanager
async def failing(way: Way, what: str, seconds: float) -> AsyncIterator[None]:
    """Within so many seconds. Whatever fails is an UpdateFailed that knows how far the update was."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise UpdateFailed(f"{what}: nothing came back within {seconds:.0f} s", half_way=way.half_way) from error
    except HeadraceError as error:
        raise UpdateFailed(f"{what}: {error}", half_way=way.half_way) from error


@contextlib.asynccontextmanager
async def standing_still(
    way: Way, pause: Callable[[], Awaitable[Any]], go_on: Callable[[], Awaitable[Any]]
) -> AsyncIterator[None]:
    """The server pauses, and goes on at the end, also where it fails before the server was touched."""
    try:
        await pause()
        yield
    except BaseException:
        if not way.half_way:
            # Unless it says that it goes on, it may stand still for ever.
            way.touched = True
            with contextlib.suppress(HeadraceError, TimeoutError):
                async with asyncio.timeout(RESUME_S):
                    await go_on()
                    way.touched = False
        raise
    await go_on()


def deadline_s(layout: Layout, base_s: float = DEADLINE_S, slowest: int = SLOWEST) -> float:
    """For one whole update; `slowest` in bytes per second."""
    return base_s + layout.nbytes / slowest


def on_this_host(url: str) -> bool:
    """Whether a URL's host is this machine: whether a socket can be bound to its address."""
    host = urlsplit(url).hostname or ""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in found:
        if ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
            return True
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.bind((address[0], 0))
            except OSError:
                continue
            return True
    return False
