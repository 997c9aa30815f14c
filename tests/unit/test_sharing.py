"""A device that several lanes share is counted once, whoever has it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from audit.records import Lane, Piece
from audit.sharing import device_seconds

PHASES = ("decode", "forward_backward", "wait_device", "wait_groups", "start", "lost")
Spans = list[tuple[str, float]]


def lane(name: str, spans: Spans, begin: float = 0.0, *, shared: bool = True, host: str = "a") -> Lane:
    pieces = []
    for phase, seconds in spans:
        pieces.append(Piece(begin, begin + seconds, phase))
        begin += seconds
    return Lane(name, "trainer", name, "device", host, 1, tuple(pieces), shared=shared)


def spent(*lanes: Lane, begin: float = float("-inf"), end: float = float("inf")) -> dict[str, dict[str, float]]:
    return {each.name: phases for each, phases in device_seconds(lanes, begin, end)}


def test_it_is_of_those_that_work_and_of_all_while_none_does() -> None:
    trainer = lane("trainer", [("wait_device", 2.0), ("forward_backward", 2.0), ("wait_groups", 2.0)])
    engine = lane("engine", [("decode", 3.0), ("wait_device", 1.0), ("wait_no_task", 2.0)])
    assert spent(trainer, engine) == {
        "trainer": {"forward_backward": 0.5 + 1.0, "wait_groups": 1.0},
        "engine": {"decode": 2.0 + 0.5, "wait_no_task": 1.0},
    }
    assert spent(trainer, engine, begin=1.0, end=2.5) == {
        "engine": {"decode": 1.0 + 0.25},
        "trainer": {"forward_backward": 0.25},
    }


def test_devices_of_their_own_and_of_other_hosts_are_counted_by_themselves() -> None:
    spans: Spans = [("decode", 2.0)]
    alone = lane("alone", spans, shared=False)
    assert spent(alone, lane("a", spans), lane("b", spans, host="b")) == {
        name: {"decode": 2.0} for name in ("alone", "a", "b")
    }


@given(st.lists(st.lists(st.tuples(st.sampled_from(PHASES), st.integers(1, 9)), min_size=1), min_size=1, max_size=4))
def test_its_seconds_sum_to_the_time_in_which_any_of_them_was_there(given_lanes: list[list[tuple[str, int]]]) -> None:
    lanes = [
        lane(f"l{number}", [(phase, float(seconds)) for phase, seconds in spans])
        for number, spans in enumerate(given_lanes)
    ]
    total = sum(seconds for phases in spent(*lanes).values() for seconds in phases.values())
    assert abs(total - max(each.pieces[-1].end for each in lanes)) < 1e-6
