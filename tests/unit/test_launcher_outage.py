"""What the launcher knows of its broker from its own calls."""

from __future__ import annotations

import pytest

from deploy.outage import NOTICED_S, TOLD_S, Outage
from headrace.errors import BrokerUnavailable


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def outage(clock: Clock) -> Outage:
    return Outage(10.0, 300.0, clock)


def test_a_broker_that_answers_soon_is_no_news(outage: Outage, clock: Clock) -> None:
    with outage.asking():
        clock.now += 0.9 * NOTICED_S
        assert outage.news() is None
        assert outage.seconds == 0
    assert outage.news() is None
    assert outage.answers.is_set()
    assert not outage.was_since(0.0)


def test_an_outage_is_told_now_and_then_and_at_its_end(outage: Outage, clock: Clock) -> None:
    with outage.asking():
        clock.now += NOTICED_S
        assert outage.news() == ("away", "no answer for 2 s; everybody waits for it, 300 s at most")
        assert not outage.answers.is_set()
        clock.now += TOLD_S / 2
        assert outage.news() is None
        clock.now += TOLD_S / 2
        event, text = outage.news() or ("", "")
        assert (event, text[:18]) == ("away", "no answer for 32 s")
        assert outage.seconds == NOTICED_S + TOLD_S
        outage.heard("Redis at x:1 is loading its data")
        clock.now += TOLD_S
        event, text = outage.news() or ("", "")
        assert text.startswith("Redis at x:1 is loading its data, for 62 s; everybody waits for it")
        outage.heard("")
    assert outage.answers.is_set()
    assert outage.seconds == 0
    assert outage.news() == ("back", "it answers again")
    assert outage.news() is None


def test_it_is_remembered_for_those_who_lived_then(outage: Outage, clock: Clock) -> None:
    with outage.asking():
        clock.now += NOTICED_S
        assert outage.was_since(clock.now)
        clock.now += 5.0
    ended = clock.now
    clock.now += 60.0
    assert outage.was_since(ended - 1.0)
    assert not outage.was_since(ended + 1.0)


def test_a_broker_that_is_given_up_is_not_there(outage: Outage, clock: Clock) -> None:
    def ask_in_vain() -> None:
        with outage.asking():
            clock.now += 300.0
            assert outage.news() is not None
            raise BrokerUnavailable("gone")

    with pytest.raises(BrokerUnavailable):
        ask_in_vain()
    assert not outage.answers.is_set()


def test_what_a_service_gives_up_for_is_noticed_before(clock: Clock) -> None:
    outage = Outage(0.5, 300.0, clock)
    with outage.asking():
        clock.now += 0.25
        assert outage.seconds == 0.25
        assert outage.news() == ("away", "no answer for 0.2 s; everybody waits for it, 300 s at most")


def test_a_broker_that_lost_the_run_was_away_for_whoever_asked_for_it(outage: Outage, clock: Clock) -> None:
    outage.emptied()
    assert outage.was_since(clock.now - 1)
    clock.now += 1
    assert not outage.was_since(clock.now)
    assert outage.seconds == 0
