"""The bytes of a long run: what was settled long ago is no longer in the broker."""

from __future__ import annotations

from broker.bounds import KEEP_SETTLED
from broker.held import Held, fitting
from broker.validate import MAX_GROUP_BYTES


def test_bytes_of_groups_that_were_settled_long_ago_are_gone() -> None:
    held = Held()
    sizes = [1000 + number for number in range(KEEP_SETTLED + 5)]
    for number, size in enumerate(sizes):
        held.add(f"{number}-0", f"t{number}", size)
    for number in range(len(sizes)):
        assert not held.settle(f"{number}-0", f"t{number}")
        assert held.nbytes == sum(sizes[max(0, number + 1 - KEEP_SETTLED) :])


def test_a_second_entry_stands_in_until_its_task_is_settled() -> None:
    held = Held()
    held.add("1-0", "a", 10)
    assert not held.has_stand_in("a")
    held.stand_in("2-0", "a")
    assert held.has_stand_in("a")
    assert not held.has_stand_in("b")
    assert held.settle("1-0", "a")
    assert not held.has_stand_in("a")


def test_a_second_entry_that_is_handed_out_stands_in_as_well() -> None:
    """The trainer settles the first, and what it knows of the task must go with it."""
    held = Held()
    held.add("1-0", "a", 10)
    held.add("2-0", "a", 20)
    assert (held.tasks, held.entries, held.stand_ins, held.nbytes) == ({"1-0": "a"}, {"a": "1-0"}, {"a": "2-0"}, 10)
    assert held.settle("1-0", "a")
    assert (tuple(held.ids()), held.entries, held.nbytes) == ((), {}, 10)


def test_what_is_handed_out_again_counts_once() -> None:
    held = Held()
    for _ in range(2):
        held.add("1-0", "a", 10)
    assert (held.nbytes, tuple(held.ids())) == (10, ("1-0",))


def test_what_fits_exactly_is_read() -> None:
    half = MAX_GROUP_BYTES // 2
    assert fitting(8, 1, half) == 2
    assert fitting(8, 2, 2 * half + 1) == 2
    assert fitting(8, 1, half + 1) == 1
