"""Bounded waiting."""

from __future__ import annotations

import asyncio


async def wait_for(event: asyncio.Event, seconds: float) -> None:
    """Until the event is set, at most so long."""
    try:
        # Not asyncio.wait_for, which swallows a cancellation that comes together with the event (before Python 3.12).
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
