"""A device that several services use in turn: this one's place in the line for it.

Wait graph: `take` waits for the line to move (the broker, by `follow`), and looks at `unless` every LOOK_S; `follow`
waits for the line, at most a quarter of the lease, or until the device is wanted here. Who has it and dies loses it
with its lease. Who has it and is too slow to keep its place is told so by `wanted`, as when others wait.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Callable
from contextlib import suppress

from broker.api import ServicePort
from headrace.config import Config

log = logging.getLogger(__name__)

LOOK_S = 0.5


def shared_device(config: Config, host: str) -> str:
    """What all call it that share one: every service of a host that computes on the configured device."""
    return f"{host}/{config.model.device}"


class Device:
    """One device, as one process of a run sees it. `follow` runs as long as it is used."""

    def __init__(self, port: ServicePort, name: str, service: str, lease_s: float) -> None:
        """`name` is the same for all that share it. `lease_s` is that of producers: where Redis stands still, that is
        how long nobody is heard."""
        self.name = name
        self.wanted = asyncio.Event()
        """Set while it is this service's and others wait for it, or once it was lost to them."""
        self._port = port
        self._holder = f"{service}/{os.getpid()}/{secrets.token_hex(4)}"
        self._lease_s = lease_s
        self._mine = asyncio.Event()
        self._asked = asyncio.Event()
        self._one = asyncio.Lock()

    async def take(self, unless: Callable[[], bool] = lambda: False) -> bool:
        """Wait for it, or until `unless` says no: whether it is this service's. Raises BrokerUnavailable, Refused."""
        self._asked.set()
        await self._look()
        while not self._mine.is_set() and not unless():
            await _within(LOOK_S, self._mine)
        return self._mine.is_set()

    async def give_up(self) -> None:
        """Leave the line, whether it is this service's or not."""
        async with self._one:
            self._asked.clear()
            self._note(await self._port.step_aside(self.name, self._holder))

    async def follow(self, over: asyncio.Event) -> None:
        """Keep the place in line and see who else stands there, until `over`."""
        while not over.is_set():
            if not self._asked.is_set():
                await _within(LOOK_S, self._asked)
                continue
            line = await self._look()
            await self._port.wait_line(self.name, line, max(1, round(self._lease_s * 250)))

    async def _look(self) -> tuple[str, ...]:
        async with self._one:
            line: tuple[str, ...] = ()
            if self._asked.is_set():
                line = await self._port.line_up(self.name, self._holder, self._lease_s)
            self._note(line)
            return line

    def _note(self, line: tuple[str, ...]) -> None:
        first = self._asked.is_set() and line[:1] == (self._holder,)
        lost = self._asked.is_set() and self._mine.is_set() and not first
        if lost:
            log.warning("lost %s to %s: this process did not say in time that it still uses it", self.name, line[0])
        for event, holds in ((self._mine, first), (self.wanted, lost or (first and len(line) > 1))):
            (event.set if holds else event.clear)()


async def _within(seconds: float, event: asyncio.Event) -> None:
    with suppress(TimeoutError):
        # Not asyncio.wait_for, which loses a cancellation that comes together with the event (Python 3.11).
        async with asyncio.timeout(seconds):
            await event.wait()
