"""Calls to a broker that may be away for a while: repeated ever more slowly, but not for ever."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from headrace.errors import BrokerUnavailable

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a broker may be away until the service ends: somebody must look at it then."""

    outage_s: float = 300.0
    first_wait_s: float = 0.1
    longest_wait_s: float = 5.0
    leaving: asyncio.Event = field(default_factory=asyncio.Event)
    """Once it is set, nothing is tried again."""

    async def __call__(self, what: str, call: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of `call`, which is repeated while it raises BrokerUnavailable; raises that after `outage_s`."""
        start, wait_s = time.monotonic(), self.first_wait_s
        while True:
            try:
                return await call(*args, **kwargs)
            except BrokerUnavailable as error:
                away_s = time.monotonic() - start
                if self.leaving.is_set() or away_s + wait_s > self.outage_s:
                    raise
                log.warning("%s waits for the broker, %.0f s so far: %s", what, away_s, error)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, self.longest_wait_s)
