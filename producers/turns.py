"""A producer's turns on a device that others of its host use, too (`run.placement = "colocated"`).

Wait graph: `run` waits until the engine is asked for tokens (a rollout, by `asking`), then for the device (who has it,
by `Device`), then until others want it, then for the sequences that decode; looks every LOOK_S whether all is over.
What is asked meanwhile waits in the engine, which fills no slot between its turns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from broker.turns import LOOK_S, Device
from producers.engines.api import SharesDevice


class Turns:
    def __init__(self, device: Device, engine: SharesDevice) -> None:
        self.device = device
        self.on_wait: Callable[[bool], None] = lambda waits: None
        """Is told when the engine begins to wait for its device, and when it does not any more."""
        self._engine = engine
        self._open = 0
        self._asked = asyncio.Event()

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Tokens are asked for within."""
        self._open += 1
        self._asked.set()
        try:
            yield
        finally:
            self._open -= 1
            if not self._open:
                self._asked.clear()

    async def run(self, over: asyncio.Event) -> None:
        """One turn after another, until `over`. Raises EngineError, BrokerUnavailable, Refused."""
        await self._engine.release()
        while not over.is_set():
            if await self._happens(self._asked):
                await self._turn(over)

    async def _turn(self, over: asyncio.Event) -> None:
        try:
            self.on_wait(True)
            has = await self.device.take(lambda: over.is_set() or not self._open)
            self.on_wait(False)
            if has:
                self._engine.resume()
                while not (over.is_set() or await self._happens(self.device.wanted)):
                    pass
                if not over.is_set():
                    await self._engine.release()
        finally:
            self.on_wait(False)
            await self.device.give_up()

    async def _happens(self, event: asyncio.Event) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await event.wait()
        return event.is_set()
