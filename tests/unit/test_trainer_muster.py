"""Whether there are producers: what is said, and from when on there were none."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from consumers.muster import BLIND_S, FIRST_S, Muster


def test_gone_and_back_are_said_once() -> None:
    muster = Muster(100.0, 100.0)
    said = [muster.look(alive, 100.0 + 5 * i) for i, alive in enumerate([0, 2, 1, 0, 0, 0, 3, 3])]
    assert said == ["", "", "", "gone", "", "", "back", ""]


def test_a_run_whose_producers_are_loading_has_not_lost_them() -> None:
    muster = Muster(0.0, 0.0)
    assert [muster.look(0, 10.0 * i) for i in range(1, 8)] == ["", "", "", "", "", "gone", ""]
    assert muster.missed_s == 70.0
    assert muster.sentence(None).startswith("no producer has joined this run yet; it waits for one")
    assert muster.look(1, 80.0) == "back"
    assert "all producers of this run are gone; without one it ends after 5 s" in muster.sentence(5)


def test_time_in_which_nobody_could_be_seen_is_not_counted() -> None:
    muster = Muster(0.0, 0.0)
    muster.look(1, 10.0)
    muster.look(0, 20.0)
    assert muster.missed_s == 10.0
    muster.look(0, 20.0 + 500.0)
    assert muster.missed_s == 10.0


@given(st.lists(st.tuples(st.integers(0, 2), st.floats(0.1, 2 * BLIND_S)), max_size=40))
def test_what_is_said_is_what_is_so(looks: list[tuple[int, float]]) -> None:
    muster, now, gone, met = Muster(0.0, 0.0), 0.0, False, False
    for alive, passed in looks:
        now += passed
        said = muster.look(alive, now)
        assert said != "gone" or not (alive or gone)
        assert said != "back" or (alive and gone)
        gone = said == "gone" or (gone and said != "back")
        met = met or alive > 0
        assert gone == muster.gone
        assert not (alive and gone)
        assert gone or alive or not met or now - muster.since < FIRST_S or not met
        assert 0 <= muster.missed_s <= now
