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
    waits.over("a", answered=True)
    assert told == ["away", "loading"], "one still waits"
    waits.over("b", answered=False)
    waits.over("c", answered=True)
    assert told == ["away", "loading", ""]
    assert caplog.messages[0] == "away; waiting for it, 300 s at most"
    assert caplog.text.count("away; ") == 1
    assert caplog.text.count("Redis at here answers again after ") == 1


@pytest.mark.parametrize(
    ("lasted_s", "most_s", "sentence"),
    [
        (0.4, 300.0, "away; waiting for it, 300 s at most"),
        (21.4, 300.0, "away; waiting for it, 21 s so far, 300 s at most"),
        (304.0, 300.0, "away; waiting for it, 300 s at most"),
    ],
)
def test_how_long_is_said_where_it_says_something(
    caplog: pytest.LogCaptureFixture, lasted_s: float, most_s: float, sentence: str
) -> None:
    Waits("here").note("a", "away", lasted_s, most_s)
    assert caplog.messages == [sentence]


def test_an_outage_is_as_long_as_the_one_who_waited_longest(caplog: pytest.LogCaptureFixture) -> None:
    waits = Waits("here")
    waits.note("long", "away", 42.0, 300.0)
    waits.note("short", "away", 0.1, 300.0)
    waits.over("short", answered=True)
    assert caplog.messages[-1] == "Redis at here answers again after 42.0 s"


def test_nobody_need_be_told() -> None:
    waits = Waits("here")
    waits.note("a", "away", NOTICED_S, 300.0)
    waits.over("a", answered=True)
