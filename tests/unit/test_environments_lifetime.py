"""Setup and teardown of whole environments."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from typing import Any

import pytest

from headrace.errors import EnvironmentLoadError
from producers.environments import lifetime
from producers.environments.lifetime import set_up


class Standing:
    """Notes what is done to it."""

    def __init__(self, name: str, notes: list[str], fault: str = "") -> None:
        self.name, self.notes, self.fault = name, notes, fault

    async def setup(self) -> None:
        self.notes.append(f"{self.name} up")
        if self.fault == "setup":
            raise OSError("no room")
        if self.fault == "hang":
            await asyncio.Event().wait()

    def teardown(self) -> None:
        self.notes.append(f"{self.name} down")
        if self.fault == "teardown":
            raise OSError("still busy")


async def live(**environments: Any) -> None:
    async with AsyncExitStack() as stack:
        await set_up(environments, stack)


async def test_each_is_set_up_before_and_torn_down_after() -> None:
    notes: list[str] = []
    async with AsyncExitStack() as stack:
        await set_up({"a": Standing("a", notes), "b": Standing("b", notes), "c": object()}, stack)  # type: ignore[dict-item]
        assert sorted(notes) == ["a up", "b up"]
    assert sorted(notes[2:]) == ["a down", "b down"]


async def test_one_that_cannot_be_set_up_is_named_and_all_are_torn_down() -> None:
    notes: list[str] = []
    with pytest.raises(EnvironmentLoadError, match=r"'b' cannot be set up: environment raised OSError: no room"):
        await live(a=Standing("a", notes), b=Standing("b", notes, "setup"))
    assert sorted(notes) == ["a down", "a up", "b down", "b up"]


async def test_one_that_hangs_is_cut_and_torn_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifetime, "SETUP_S", 0.05)
    notes: list[str] = []
    with pytest.raises(EnvironmentLoadError, match=r"'a' cannot be set up: environment took longer than 0.05 s"):
        await live(a=Standing("a", notes, "hang"))
    assert notes == ["a up", "a down"]


async def test_a_cancelled_setup_is_torn_down() -> None:
    notes: list[str] = []
    living = asyncio.ensure_future(live(a=Standing("a", notes, "hang")))
    while not notes:  # noqa: ASYNC110 - it has no event
        await asyncio.sleep(0)
    living.cancel()
    await asyncio.wait({living})
    assert living.cancelled()
    assert notes == ["a up", "a down"]


async def test_a_teardown_that_fails_keeps_nobody(caplog: pytest.LogCaptureFixture) -> None:
    notes: list[str] = []
    with caplog.at_level(logging.WARNING):
        await live(a=Standing("a", notes, "teardown"), b=Standing("b", notes))
    assert "environment 'a' is not torn down: environment raised OSError: still busy" in caplog.text
    assert "b down" in notes
