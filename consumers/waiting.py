"""Bounded waiting."""

from __future__ import annotations

import asyncio


async def wait_for(event: asyncio.Event, seconds: float) -> None:
    """Until the event is set, at most so long."""
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except TimeoutError:
        return
