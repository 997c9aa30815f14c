"""How long the calls into an environment take, and for how long each keeps the event loop to itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

BLOCKS_S = 0.1
"""An event loop that stands still for so long, at every call of a method, is worth a word."""
TICK_S = 0.002


@dataclass(slots=True)
class Clock:
    """How long calls of each method took, and for how long each stood in everybody's way."""

    took: dict[str, list[float]] = field(default_factory=dict)
    blocked: dict[str, list[float]] = field(default_factory=dict)
    _seen: float = 0.0
    _longest: float = 0.0

    async def watch(self) -> None:
        """For as long as calls are timed."""
        self._seen = time.perf_counter()
        while True:
            await asyncio.sleep(TICK_S)
            self._look()

    async def time(self, method: str, call: Callable[[], Any]) -> Any:
        await asyncio.sleep(2 * TICK_S)
        self._look()
        self._longest, start = 0.0, time.perf_counter()
        try:
            return await call()
        finally:
            self._look()
            self.took.setdefault(method, []).append(time.perf_counter() - start)
            self.blocked.setdefault(method, []).append(max(0.0, self._longest - TICK_S))

    def _look(self) -> None:
        now = time.perf_counter()
        self._longest, self._seen = max(self._longest, now - self._seen), now
