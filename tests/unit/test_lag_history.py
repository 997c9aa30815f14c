"""Histories at their edges: the newest incarnation, one that has just begun, and the first of all."""

from __future__ import annotations

from broker.api import Reign
from consumers.lag import History, loss_tokens
from headrace.version import PolicyVersion
from tests.groups import group, trajectory

FORKED = History({1: Reign(0, 9), 2: Reign(4, 8)})


def test_an_incarnation_knows_itself() -> None:
    astray = PolicyVersion(1, 9)
    assert FORKED.lag(astray, 8) == (8 - 4) + (9 - 4)
    assert FORKED.until(2).lag(astray, 8) == FORKED.lag(astray, 8)


def test_the_first_incarnation_gives_nothing_up() -> None:
    assert History({}).given_up(PolicyVersion(1, 0)) == 0
    assert FORKED.given_up(PolicyVersion(1, 0)) == 0


def test_one_that_began_and_published_nothing_more_ends_where_it_began() -> None:
    begun = FORKED.begun(PolicyVersion(3, 6))
    assert begun.given_up(PolicyVersion(4, 6)) == 0
    assert begun.given_up(PolicyVersion(4, 5)) == 1


def test_tokens_of_the_loss_are_those_under_the_mask() -> None:
    assert loss_tokens(group(trajectory(5, 5, masked=(0,)), trajectory(5, 6))) == 3
    assert loss_tokens(group(trajectory(5, masked=(0,)))) == 0
