"""Tasks of an environment whose scores are behind are held back, and others' go on."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from broker.messages import TaskDelivery
from headrace.version import PolicyVersion
from producers.capacity import Capacity
from producers.holding import Held
from producers.in_play import InPlay
from producers.backlog import flows, loads_of, may_begin, must_hold_back, room
from tests.support import make_task

VERSION = PolicyVersion(1, 4)
CAPACITY = Capacity(slots=8, group_size=4)
"""3 unscored groups of an environment are too many, 6 decoded ones of all."""


def held(environment: str = "a", playing: int = 0, scoring: int = 0, *, held_back: bool = False) -> Held:
    in_play = InPlay(playing + scoring)
    for seat in in_play.seats[playing:]:
        in_play.move(seat, "score")
    task = replace(make_task("t"), environment=environment)
    return Held(TaskDelivery("1-0", 1, task), in_play, 10.0, False, held_back=held_back)


def waits(environment: str, *tasks: Held) -> bool:
    return must_hold_back(environment, loads_of([*tasks, held(environment, 4)]), CAPACITY)


UNSCORED = [held("a", 0, 4)] * CAPACITY.most_unscored


def test_an_environment_that_is_behind_waits_only_where_another_flows() -> None:
    assert not waits("a", *UNSCORED)
    assert not waits("a", *UNSCORED[1:], held("b", 4))
    assert waits("a", *UNSCORED, held("b", 4))
    assert waits("a", *UNSCORED, held("b", 0, 4))
    assert not waits("b", *UNSCORED)
    # What still decodes is not behind, and what is scored waits for the broker only.
    assert not waits("a", *[held("a", 1, 3)] * 9, *[held("a")] * 9, held("b", 4))
    # Two that are behind hold up each other in vain.
    assert not waits("a", *UNSCORED, *[held("b", 0, 4)] * 3)


def test_tasks_begin_in_their_order() -> None:
    """Who comes while others wait goes behind them, also where there would be room again."""
    assert waits("a", held("a", 4, held_back=True), held("b", 4))
    assert may_begin("a", loads_of([held("a", 4, held_back=True), *UNSCORED[1:]]), CAPACITY)
    assert not may_begin("a", loads_of([held("a", 4, held_back=True), *UNSCORED]), CAPACITY)
    # One that begins takes the place at once.
    assert not may_begin("a", loads_of([held("a", 4, held_back=True), held("a", 4), *UNSCORED[1:]]), CAPACITY)


def test_what_was_lost_counts_nowhere() -> None:
    lost = held("b", 4)
    lost.lost = True
    assert not waits("a", *UNSCORED, lost)
    assert loads_of([lost]) == {}


def test_unscored_groups_of_one_environment_take_no_place_of_others() -> None:
    assert room([held("a", 0, 4)] * 6, VERSION, CAPACITY) == 0
    assert room([*[held("a", 0, 4)] * 6, held("b", 4)], VERSION, CAPACITY) == 2
    assert room([*[held("a", 4, held_back=True)] * 4, *UNSCORED, held("b", 4)], VERSION, CAPACITY) == 2
    # Groups that wait for the broker are everybody's.
    assert room([*[held("a")] * 6, held("b", 4)], VERSION, CAPACITY) == 0


def test_nothing_is_taken_while_nobody_flows() -> None:
    assert room([*UNSCORED, *[held("b", 0, 4)] * 3], VERSION, CAPACITY) == 0
    assert room([*UNSCORED, held("a", 4, held_back=True)], VERSION, CAPACITY) == 0
    assert room(UNSCORED, VERSION, CAPACITY) == 3


tasks = st.builds(
    held,
    st.sampled_from("abc"),
    st.integers(0, 4),
    st.integers(0, 4),
    held_back=st.booleans(),
)


@given(st.lists(tasks, max_size=40))
def test_what_is_held_stays_bounded(present: list[Held]) -> None:
    count = room(present, VERSION, CAPACITY)
    assert 0 <= count <= max(0, CAPACITY.most_held - len(present))


@given(st.integers(0, 12), st.integers(0, 12), st.integers(1, 4))
def test_slots_are_filled_for_an_environment_that_flows(unscored: int, waiting: int, playing: int) -> None:
    """However far another one is behind, within what may be held."""
    present = [*[held("a", 0, 4)] * unscored, *[held("a", 4, held_back=True)] * waiting, held("b", playing)]
    count = room(present, VERSION, CAPACITY)
    if len(present) + 4 <= CAPACITY.most_held:
        assert playing + 4 * count >= CAPACITY.slots + CAPACITY.group_size
    assert flows(loads_of(present), CAPACITY)
