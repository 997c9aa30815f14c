"""What a trainer holds of the broker, and how much it reads at once: pure decisions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from broker.bounds import KEEP_SETTLED
from broker.held import Held, fitting
from broker.validate import MAX_GROUP_BYTES


@given(st.integers(1, 64), st.integers(-5, 1 << 20), st.integers(-5, 1 << 44))
def test_what_is_read_at_once_fits_on_the_average(count: int, number: int, nbytes: int) -> None:
    reads = fitting(count, number, nbytes)
    assert 1 <= reads <= count
    if reads > 1:
        assert reads * (nbytes // max(1, number)) <= MAX_GROUP_BYTES


def test_small_groups_are_read_together_and_huge_ones_alone() -> None:
    assert fitting(32, 0, 0) == 32
    assert fitting(32, 200, 200 * 460_000) == 32
    assert fitting(32, 3, 3 * (200 << 20)) == 1
    assert fitting(32, 32, (200 << 20) + 31 * 460_000) == 9


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=200))
def test_bytes_are_those_that_are_held_and_the_newest_that_were_settled(steps: list[tuple[int, bool]]) -> None:
    held, open_, done = Held(), {}, []
    for number, (which, adds) in enumerate(steps):
        if adds:
            open_[f"{number}-0"] = number + 1
            held.add(f"{number}-0", f"t{number}", number + 1)
            held.stand_in(f"{number}-1", f"t{number}")
        elif open_:
            entry_id = list(open_)[which % len(open_)]
            assert held.settle(entry_id, f"t{entry_id[:-2]}")
            assert not held.settle(entry_id, f"t{entry_id[:-2]}")
            done.append(open_.pop(entry_id))
        assert held.nbytes == sum(open_.values()) + sum(done[-KEEP_SETTLED:])
        assert set(held.tasks) == set(open_) == set(held.entries.values())
        assert all(held.knows(entry_id) and held.knows(entry_id[:-1] + "1") for entry_id in open_)
        assert len(tuple(held.ids())) == 2 * len(open_)
    held.clear()
    assert (tuple(held.ids()), held.nbytes) == ((), 0)
