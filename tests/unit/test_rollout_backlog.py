"""Tasks of an environment whose scores are behind are held back, and others' go on."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from broker.messages import TaskDelivery
from headrace.version import PolicyVersion
from producers.backlog import flows, loads_of, must_hold_back, room, to_begin
from producers.capacity import Capacity
from producers.holding import Held
from producers.in_play import InPlay
from tests.support import make_task

VERSION = PolicyVersion(1, 4)
CAPACITY = Capacity(slots=8, group_size=4, environments=3)
"""3 unscored groups of an environment are too many, 6 decoded ones of all."""
ALONE = Capacity(slots=8, group_size=4)


def held(environment: str = "a", playing: int = 0, scoring: int = 0, *, held_back: bool = False) -> Held:
    in_play = InPlay(playing + scoring)
    for seat in in_play.seats[playing:]:
        in_play.move(seat, "score")
    task = replace(make_task("t"), environment=environment)
    return Held(TaskDelivery("1-0", 1, task), in_play, 10.0, False, held_back=held_back)


def holds_back(environment: str, *tasks: Held, capacity: Capacity = CAPACITY) -> bool:
    return must_hold_back(environment, loads_of([*tasks, held(environment, 4)]), capacity)


UNSCORED = [held("a", 0, 4)] * CAPACITY.most_unscored


def test_an_environment_that_is_behind_is_held_back() -> None:
    assert holds_back("a", *UNSCORED)
    assert not holds_back("b", *UNSCORED)
    assert not holds_back("a", *UNSCORED[1:], *[held("b", 0, 4)] * 9)
    # What still decodes is not behind, and what is scored waits for the broker only.
    assert not holds_back("a", *[held("a", 1, 3)] * 9, *[held("a")] * 9)
    assert not holds_back("a", *UNSCORED, capacity=ALONE)


def test_tasks_begin_in_their_order() -> None:
    """Who comes while others are held back goes behind them, also where there would be room again."""
    assert holds_back("a", held("a", 4, held_back=True))
    first, second, other = (held(name, 4, held_back=True) for name in "aab")
    assert to_begin([*UNSCORED[1:], first, second, other], CAPACITY) == [first, other]
    assert to_begin([*UNSCORED[2:], first, second], CAPACITY) == [first, second]
    assert to_begin([*UNSCORED, first, second], CAPACITY) == []
    # One that begins takes the place at once.
    assert to_begin([held("a", 4), *UNSCORED[1:], first], CAPACITY) == []


def test_others_flow_while_one_is_behind() -> None:
    assert flows(loads_of([*UNSCORED, held("b", 4)]), CAPACITY)
    assert flows(loads_of([*UNSCORED, held("b", 0, 4)]), CAPACITY)
    assert not flows(loads_of(UNSCORED), CAPACITY)
    assert not flows(loads_of([*UNSCORED, *[held("b", 0, 4)] * 3]), CAPACITY)
    assert not flows(loads_of([held("a", 4, held_back=True)]), CAPACITY)


def test_what_was_lost_counts_nowhere() -> None:
    lost = held("a", 0, 4)
    lost.lost = True
    assert loads_of([lost]) == {}
    assert not must_hold_back("a", loads_of([lost]), CAPACITY)
    lost.held_back = True
    assert to_begin([lost], CAPACITY) == []
    assert room([lost] * 30, VERSION, CAPACITY) == 3


def test_unscored_groups_of_one_environment_take_no_place_of_others() -> None:
    assert room([held("a", 0, 4)] * 6, VERSION, ALONE) == 0
    assert room([held("a", 0, 4)] * 6, VERSION, CAPACITY) == 3
    assert room([*[held("a", 4, held_back=True)] * 4, *UNSCORED, held("b", 4)], VERSION, CAPACITY) == 2
    # Groups that wait for the broker are everybody's.
    assert room([*[held("a")] * 6, held("b", 4)], VERSION, CAPACITY) == 0
    assert room([held("a", 4, held_back=True)] * CAPACITY.most_held, VERSION, CAPACITY) == 0


tasks = st.builds(
    held,
    st.sampled_from("abc"),
    st.integers(0, 4),
    st.integers(0, 4),
    held_back=st.booleans(),
)


@given(st.lists(tasks, max_size=40), st.sampled_from([CAPACITY, ALONE]))
def test_what_is_held_stays_bounded(present: list[Held], capacity: Capacity) -> None:
    count = room(present, VERSION, capacity)
    assert 0 <= count <= max(0, capacity.most_held - len(present))


@given(st.integers(0, 12), st.integers(0, 12), st.integers(0, 4))
def test_slots_are_filled_however_far_one_environment_is_behind(unscored: int, kept: int, playing: int) -> None:
    present = [*[held("a", 0, 4)] * unscored, *[held("a", 4, held_back=True)] * kept, held("b", playing)]
    count = room(present, VERSION, CAPACITY)
    if len(present) + 3 <= CAPACITY.most_held:
        assert playing + 4 * count >= CAPACITY.slots + CAPACITY.group_size
