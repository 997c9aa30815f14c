"""How many tasks are taken, and figures between two readings."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from producers.capacity import Capacity
from producers.engines.api import EngineStats
from producers.gauges import occupancy, rate

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


def test_figures_between_two_readings() -> None:
    before = EngineStats(4, 0, 0, decode_steps=10, decoded_tokens=5, prefill_tokens=0, busy_slot_steps=20)
    after = EngineStats(4, 0, 0, decode_steps=20, decoded_tokens=5, prefill_tokens=0, busy_slot_steps=50)
    assert occupancy(after, before) == 0.75
    assert occupancy(after, after) == 0.0
    assert (rate(10, 4.0), rate(1, 0.0)) == (2.5, 0.0)
