"""How many tasks are taken, how long a broker may be away, and what a producer is told at its start."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import BrokerUnavailable, ConfigError
from producers.capacity import Capacity
from producers.engines.api import EngineStats
from producers.gauges import occupancy, rate
from producers.patience import Patience
from producers.start import Settings, holds_password

sizes = st.tuples(st.integers(1, 64), st.integers(0, 64)).map(lambda pair: Capacity(pair[0] + pair[1], pair[0]))


@given(sizes, st.integers(0, 300), st.integers(0, 300))
def test_slots_stay_full_and_what_is_held_stays_bounded(capacity: Capacity, playing: int, decoded: int) -> None:
    count = capacity.tasks_to_take(playing, decoded)
    after = playing + count * capacity.group_size
    assert count >= 0
    assert after <= max(playing, capacity.most_playing)
    if decoded < capacity.most_decoded:
        assert after >= capacity.slots + capacity.group_size
    else:
        assert count == 0


@given(sizes, st.data())
def test_a_long_tail_does_not_hold_up_the_slots(capacity: Capacity, data: st.DataObject) -> None:
    """However few members of each group still play, all slots and one group's worth beyond are filled."""
    groups = [capacity.group_size] * capacity.tasks_to_take(0, 0)
    for _ in range(20):
        groups = [data.draw(st.integers(0, playing)) if playing else 0 for playing in groups]
        groups = [playing for playing in groups if playing]
        groups += [capacity.group_size] * capacity.tasks_to_take(sum(groups), 0)
        assert sum(groups) >= capacity.slots + capacity.group_size
        assert len(groups) <= capacity.most_held


class Broker:
    """Away for the first `outages` calls."""

    def __init__(self, outages: int) -> None:
        self.outages, self.calls = outages, 0

    async def ask(self, question: str) -> str:
        self.calls += 1
        if self.calls <= self.outages:
            raise BrokerUnavailable("away")
        return question.upper()


async def test_a_call_is_repeated_until_the_broker_is_back() -> None:
    broker = Broker(outages=3)
    assert await Patience(10.0, first_wait_s=0.001)("ask", broker.ask, "why") == "WHY"
    assert broker.calls == 4


async def test_a_broker_that_stays_away_is_an_error() -> None:
    broker = Broker(outages=1000)
    with pytest.raises(BrokerUnavailable, match="away"):
        await Patience(0.05, first_wait_s=0.01)("ask", broker.ask, "why")
    assert 1 < broker.calls < 10


ENVIRON = {"HEADRACE_REDIS_URL": "redis://:secret@h:1/0", "HEADRACE_RUN": "r1", "HEADRACE_METRICS_PORT": "9100"}


def test_flags_go_before_the_environment() -> None:
    told = Settings.of({}, ENVIRON)
    assert (told.url, told.run_id, told.metrics_port) == ("redis://:secret@h:1/0", "r1", 9100)
    assert told.name.startswith("producer-")
    assert "secret" not in repr(told)
    flags = {"redis_url": "redis://h:2", "run": "r2", "name": "p-1.a", "metrics_port": "0"}
    assert Settings.of(flags, ENVIRON) == Settings("redis://h:2", "r2", "p-1.a", 0)


@pytest.mark.parametrize(
    ("flags", "environ", "sentence"),
    [
        ({"redis_url": "redis://:secret@h"}, ENVIRON, "--redis-url holds a password"),
        ({}, {"HEADRACE_RUN": "r1"}, "HEADRACE_REDIS_URL is not set"),
        ({"redis_url": "redis://h"}, {}, "no run is named; set HEADRACE_RUN or pass --run"),
        ({"name": "../x"}, ENVIRON, "producer name '../x' must be"),
        ({"metrics_port": "70000"}, ENVIRON, "metrics port '70000' is not a number from 0 to 65535"),
    ],
)
def test_what_is_missing_or_wrong_is_one_sentence(
    flags: dict[str, str | None], environ: dict[str, str], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        Settings.of(flags, environ)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("url", ["redis://u:p@h", "rediss://:p@h:1/0", "redis://h?password=p", "u:p@h", ":p@h:6379"])
def test_passwords_in_urls_are_seen(url: str) -> None:
    assert holds_password(url)


@pytest.mark.parametrize("url", ["", "redis://h:1/0", "redis://user@h", "unix:///tmp/redis.sock", "redis://h?db=1"])
def test_urls_without_a_password_pass(url: str) -> None:
    assert not holds_password(url)


def test_figures_between_two_readings() -> None:
    before = EngineStats(4, 0, 0, decode_steps=10, decoded_tokens=5, prefill_tokens=0, busy_slot_steps=20)
    after = EngineStats(4, 0, 0, decode_steps=20, decoded_tokens=5, prefill_tokens=0, busy_slot_steps=50)
    assert occupancy(after, before) == 0.75
    assert occupancy(after, after) == 0.0
    assert (rate(10, 4.0), rate(1, 0.0)) == (2.5, 0.0)
