"""Orders to go back to an earlier version: which wait, and what is answered at once."""

from __future__ import annotations

import pytest

from broker.api import Order
from consumers.rollback import MOST, Asked, Rollbacks
from headrace.version import PolicyVersion


def order(version: str, mark: str = "me") -> Order:
    return Order("1-0", "rollback", target=version, reason=mark)


def test_orders_wait_for_the_end_of_a_step_and_are_answered_by_their_mark() -> None:
    woken: list[bool] = []
    rollbacks = Rollbacks(lambda: woken.append(True))
    assert not rollbacks
    rollbacks.order(order("1.4", "a"))
    rollbacks.order(order("2.0", "b"))
    assert (bool(rollbacks), len(woken), rollbacks.answers) == (True, 2, {})
    first, second = rollbacks.next(), rollbacks.next()
    assert (first, second) == (Asked(PolicyVersion(1, 4), "a"), Asked(PolicyVersion(2, 0), "b"))
    assert rollbacks.next() is None
    assert first is not None
    assert second is not None
    rollbacks.done(first, PolicyVersion(2, 9))
    rollbacks.refuse(second, "it is gone")
    assert rollbacks.answers == {"a": {"version": "2.9"}, "b": {"refused": "it is gone"}}


@pytest.mark.parametrize("text", ["", "trainer", "1", "1.x", "1.2.3"])
def test_what_is_no_version_is_refused_at_once(text: str) -> None:
    rollbacks = Rollbacks(lambda: None)
    rollbacks.order(order(text))
    assert not rollbacks
    assert rollbacks.answers == {"me": {"refused": f"{text!r} is no version"}}


def test_no_more_wait_than_are_bounded_nor_are_more_answers_kept() -> None:
    rollbacks = Rollbacks(lambda: None)
    for number in range(MOST + 1):
        rollbacks.order(order(f"1.{number}", f"mark {number}"))
    assert rollbacks.answers == {f"mark {MOST}": {"refused": f"{MOST} rollbacks wait already"}}
    rollbacks.close("the run is at its end")
    assert len(rollbacks.answers) == MOST
    assert set(rollbacks.answers) == {f"mark {number}" for number in range(MOST)}, "the newest answers are kept"
    assert not rollbacks


def test_at_the_end_everybody_is_refused() -> None:
    rollbacks = Rollbacks(lambda: None)
    rollbacks.order(order("1.1", "before"))
    rollbacks.close("the run is at its end")
    rollbacks.order(order("1.1", "after"))
    assert rollbacks.answers == {mark: {"refused": "the run is at its end"} for mark in ("before", "after")}
