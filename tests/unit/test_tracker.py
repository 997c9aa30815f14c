"""Who is sent to whom: the origin sends about once, nobody has too many children, and nobody waits in a ring."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from headrace.version import PolicyVersion
from weightsync.tracker import CHILDREN, HOLDING_S, MAX_PULLS, PULLING_S, SUSPECT_S, Tracker

KEY = (PolicyVersion(1, 3), 0)
ORIGIN = "origin:1"


def ask(tracker: Tracker, name: str, now: float = 0.0, *, relay: bool = True, **more: object) -> list[str]:
    return tracker.ask(KEY, name, f"{name}:1" if relay else "", now, origin=ORIGIN, **more)  # type: ignore[arg-type]


def test_the_first_gets_the_origin_and_the_next_ones_a_tree() -> None:
    tracker = Tracker()
    firsts = [ask(tracker, name)[0] for name in "abcdefg"]
    assert firsts == [ORIGIN, "a:1", "a:1", "b:1", "b:1", "c:1", "c:1"]


def test_who_joins_when_all_have_it_is_sent_to_them_and_not_to_the_origin() -> None:
    tracker = Tracker()
    ask(tracker, "a")
    tracker.done(KEY, "a", 1.0, holds=True)
    assert ask(tracker, "b", 2.0) == ["a:1", ORIGIN]


def test_who_cannot_relay_is_nobodys_parent() -> None:
    tracker = Tracker()
    assert ask(tracker, "leaf", relay=False) == [ORIGIN]
    assert ask(tracker, "b") == [], "the origin's slot is taken"
    tracker.done(KEY, "leaf", 1.0, holds=True)
    assert ask(tracker, "b", 2.0) == [ORIGIN]


def test_a_second_slot_of_the_origin_is_for_one_whose_parent_failed() -> None:
    tracker = Tracker()
    for name in "abc":
        ask(tracker, name)
    # The link from a to b is broken; a goes on.
    assert ask(tracker, "b", 1.0, failed=["a:1"]) == [ORIGIN]
    ask(tracker, "a", 1.5, parent=ORIGIN)
    assert ask(tracker, "c", 2.0, failed=["a:1"])[0] == "b:1"


def test_a_failed_parent_is_not_named_to_others_for_a_while_unless_it_is_heard_again() -> None:
    tracker = Tracker()
    for name in "ab":
        ask(tracker, name)
    ask(tracker, "b", 1.0, failed=["a:1"])
    assert "a:1" not in ask(tracker, "c", 2.0)
    assert "a:1" in ask(tracker, "d", 1.5 + SUSPECT_S)
    ask(tracker, "b", 13.0, failed=["a:1"])
    ask(tracker, "a", 14.0, parent=ORIGIN)
    assert "a:1" in ask(tracker, "e", 15.0)


def test_the_origin_is_named_again_to_one_that_it_failed_when_nobody_else_is_there() -> None:
    tracker = Tracker()
    assert ask(tracker, "a", failed=[ORIGIN]) == [ORIGIN]


def test_a_present_parent_stays_the_first_choice() -> None:
    tracker = Tracker()
    for name in "abc":
        ask(tracker, name)
    assert ask(tracker, "c", 5.0, parent="a:1")[0] == "a:1"
    assert ask(tracker, "a", 5.0)[0] == ORIGIN, "asking again without saying whom it has"


def test_who_left_or_is_silent_frees_its_place() -> None:
    tracker = Tracker()
    ask(tracker, "a", relay=False)
    tracker.done(KEY, "a", 1.0, holds=False)
    assert ask(tracker, "b", 1.0, relay=False) == [ORIGIN]
    assert ask(tracker, "c", PULLING_S + 0.5, relay=False) == []
    assert ask(tracker, "c", PULLING_S + 1.5, relay=False) == [ORIGIN]


def test_holders_are_remembered_for_longer_but_not_for_ever() -> None:
    tracker = Tracker()
    ask(tracker, "a")
    tracker.done(KEY, "a", 0.0, holds=True)
    assert "a:1" in ask(tracker, "b", HOLDING_S - 1)
    tracker.done(KEY, "b", HOLDING_S - 1, holds=False)
    assert "a:1" not in ask(tracker, "c", HOLDING_S + 1)


def test_versions_and_parts_are_apart_and_bounded() -> None:
    tracker = Tracker()
    for step in range(3 * MAX_PULLS):
        key = (PolicyVersion(1, step), step % 3)
        assert tracker.ask(key, "a", "a:1", 0.0, origin=ORIGIN) == [ORIGIN]
    assert len(tracker._pulls) <= MAX_PULLS


events = st.lists(
    st.tuples(st.sampled_from(["ask", "fail", "hold", "leave", "wait"]), st.integers(0, 7)), min_size=1, max_size=60
)


# One that has left and comes again is behind those whom it had served.
@example([("ask", 0), ("ask", 1), ("leave", 0), ("ask", 0), ("ask", 1)], 1, set())
@given(events, st.integers(1, 3), st.sets(st.integers(0, 7)))
def test_no_ring_no_crowd_and_about_one_from_the_origin(
    history: list[tuple[str, int]], slots: int, leaves: set[int]
) -> None:
    """Whatever happens: a parent is an earlier puller or the origin, and places are not given away twice."""
    tracker = Tracker(slots)
    now = 0.0
    arrival: dict[str, int] = {}
    parents: dict[str, str] = {}
    seen: dict[str, float] = {}
    holders: set[str] = set()
    for count, (event, number) in enumerate(history):
        name = f"p{number}"
        now += PULLING_S * 2 if event == "wait" else 0.01
        for other in [o for o in arrival if now - seen[o] > (HOLDING_S if o in holders else PULLING_S)]:
            del arrival[other]
            parents.pop(other, None)
        if event in ("ask", "fail"):
            failed = [parents[name]] if event == "fail" and parents.get(name) else []
            named = ask(tracker, name, now, relay=number not in leaves, failed=failed)
            arrival.setdefault(name, count)
            for other in arrival:
                # The tracker sends nobody else there, and takes it for one without a parent.
                if f"{other}:1" in failed:
                    parents[other] = ""
                    holders.discard(other)
            parents[name], seen[name] = named[0] if named else "", now
            holders.discard(name)
            assert len(named) == len(set(named)) <= 3
            assert all(parent == ORIGIN or arrival[parent[:-2]] < arrival[name] for parent in named)
            assert not failed or named[:1] != failed or named == [ORIGIN]
            crowd = [*parents.values()]
            assert crowd.count(ORIGIN) <= slots + 1
            assert all(crowd.count(parent) <= CHILDREN for parent in crowd if parent not in ("", ORIGIN))
        elif event in ("hold", "leave") and name in arrival:
            tracker.done(KEY, name, now, holds=event == "hold")
            parents.pop(name, None)
            seen[name] = now
            holders.add(name)
            if event == "leave" or number in leaves:
                del arrival[name]
