"""How the loops of a producer wait inside their process."""

from __future__ import annotations

import asyncio

import pytest

from producers.loops import _within


async def test_it_says_whether_it_came_to_pass() -> None:
    happened = asyncio.Event()
    assert not await _within(0.001, happened.wait())
    happened.set()
    assert await _within(0.0, happened.wait())


@pytest.mark.parametrize("turns", range(4))
async def test_a_cancellation_that_comes_with_what_is_waited_for_is_not_lost(turns: int) -> None:
    happened = asyncio.Event()
    waiting = asyncio.create_task(_within(60.0, happened.wait()))
    for _ in range(3):
        await asyncio.sleep(0)
    happened.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    asked = waiting.cancel()
    await asyncio.wait({waiting})
    assert waiting.cancelled() == asked
