"""What becomes of a group that arrives, and of a second one of its task."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.messages import Group, Verdict
from consumers.ingest import SeenTasks, judge
from tests.groups import group, trajectory


@pytest.mark.parametrize(
    ("arrived", "verdict"),
    [
        (group(outcome="failed", error="reward raised ValueError: no"), ("failed", "reward raised ValueError: no")),
        (group(outcome="dead", error="schema 2"), ("dead", "schema 2")),
        (group(outcome="lost", error="Redis lost it"), ("lost", "Redis lost it")),
        (group(outcome="stale", error="lag 9", stopped=(4, 7)), ("stale", "lag 9")),
        (group(failures=("deadline",)), ("failed", "deadline")),
        (group(), ("failed", "the group is empty")),
        (group(trajectory(1, reward=float("nan"))), ("failed", "a reward is not finite")),
        (group(trajectory(1, masked=(0,))), ("filtered", "no token was sampled")),
        (group(trajectory(1)), None),
    ],
)
def test_verdicts(arrived: Group, verdict: tuple[str, str] | None) -> None:
    assert judge(arrived) == verdict


def test_a_task_has_one_verdict_also_after_a_restart() -> None:
    seen = SeenTasks(10)
    seen.hold("a")
    seen.judge("b", "stale")
    seen.judge("b", "trained")
    assert (seen.holds("a"), seen.verdict("a"), "a" in seen) == (True, None, True)
    assert (seen.holds("b"), seen.verdict("b")) == (False, "stale")
    again = SeenTasks(10, seen.with_trained(["a"]))
    assert (again.verdict("a"), again.verdict("b"), "c" in again) == ("trained", "stale", False)


verdicts = st.sampled_from(["trained", "stale", "failed"])


@given(st.integers(1, 5), st.lists(st.tuples(st.integers(0, 9), verdicts), max_size=40))
def test_the_window_is_bounded_and_forgets_the_oldest_but_nothing_held(
    capacity: int, judged: list[tuple[int, Verdict]]
) -> None:
    seen = SeenTasks(capacity)
    for held in ("x", "y", "z"):
        seen.hold(held)
    for number, verdict in judged:
        seen.judge(f"t{number}", verdict)
        assert seen.verdict(f"t{number}") is not None
    kept = seen.with_trained([])
    assert len(kept) <= capacity
    assert all(seen.holds(held) for held in ("x", "y", "z"))
