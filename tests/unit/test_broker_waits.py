"""What is said of calls that wait for Redis: once for all of them, and who is told."""

from __future__ import annotations

import pytest

from broker.redis.waits import NOTICED_S, Waits


def test_an_outage_is_told_when_it_begins_changes_and_ends(caplog: pytest.LogCaptureFixture) -> None:
    told: list[str] = []
    waits = Waits("here")
    waits.on_outage = told.append
    for lasted in (0.0, NOTICED_S / 2):
        waits.note("a", "away", lasted, 300.0)
    assert told == [], "a connection that is opened anew is no outage"
    for call in ("a", "b"):
        waits.note(call, "away", NOTICED_S, 300.0)
    waits.note("b", "loading", 2 * NOTICED_S, 300.0)
    waits.note("b", "", 2 * NOTICED_S, 300.0)
    waits.over("a", 2.0, answered=True)
    assert told == ["away", "loading"], "one still waits"
    waits.over("b", 3.0, answered=False)
    waits.over("c", 0.5, answered=True)
    assert told == ["away", "loading", ""]
    assert caplog.text.count("away; waiting for it, 0 s so far, 300 s at most") == 1
    assert caplog.text.count("Redis at here answers again after 2.0 s") == 1


def test_nobody_need_be_told() -> None:
    waits = Waits("here")
    waits.note("a", "away", NOTICED_S, 300.0)
    waits.over("a", 2.0, answered=True)
