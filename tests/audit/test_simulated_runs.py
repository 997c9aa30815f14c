"""What the audit says of runs whose bottleneck is known, and that its sums are sums."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from audit.analysis import Audit, analyse, as_json
from audit.figures import idle_wait
from audit.levers import LEVER_OF
from audit.path import critical_path
from audit.records import Piece, Run
from tests.audit.simulated import simulated

PLANTED: dict[str, dict[str, object]] = {
    "reward": {"score_s": 0.6, "scorers": 1, "train_s": 0.3, "decode_s": [0.4]},
    "straggler": {"decode_s": [0.4, 4.0], "train_s": 0.3, "max_lag": 1},
    "weight_sync": {"transfer_s": 1.5, "train_s": 0.2, "decode_s": [0.3], "max_lag": 1},
    "too_few_producers": {"decode_s": [1.0], "room": 1},
    "too_many_producers": {"decode_s": [0.4] * 4, "train_s": 1.0},
    "checkpoint": {"checkpoint_s": 1.5, "train_s": 0.3, "decode_s": [0.4]},
    "staleness_bound": {"max_lag": 0},
    "trainer": {"decode_s": [0.5], "train_s": 0.5},
}


@pytest.mark.parametrize("planted", PLANTED)
def test_the_bottleneck_is_named(planted: str) -> None:
    found = analyse(simulated(**PLANTED[planted]))
    assert found.bottleneck.name == planted
    assert found.bottleneck.evidence
    assert found.levers[0].name == LEVER_OF[planted]


def in_turns(run: Run) -> Run:
    """The same with one device for both stages: with `max_lag` 0 they take turns anyway."""
    lanes = tuple(replace(lane, shared=lane.is_device) for lane in run.lanes)
    return replace(run, lanes=lanes, config={**run.config, "run": {"placement": "colocated"}})


def test_one_device_for_both_stages_is_counted_once_and_is_the_bottleneck() -> None:
    run = simulated(max_lag=0)
    two, one = analyse(run), analyse(in_turns(run))
    assert one.bottleneck.name == "device"
    assert one.levers[0].name == LEVER_OF["device"]
    assert {lever.name for lever in one.levers}.isdisjoint({"placement", "producers", "staleness_bound"})
    assert one.split is None
    assert one.figures.consumed_per_device_hour == pytest.approx(2 * two.figures.consumed_per_device_hour)
    begin, end = (edge(piece for lane in run.lanes for piece in lane.pieces) for edge in (_first, _last))
    assert one.figures.device_hours * 3600 == pytest.approx(end - begin)
    assert one.figures.idle_wait == two.figures.idle_wait


def _first(pieces: Iterable[Piece]) -> float:
    return min(piece.begin for piece in pieces)


def _last(pieces: Iterable[Piece]) -> float:
    return max(piece.end for piece in pieces)


plans = st.fixed_dictionaries(
    {
        "steps": st.integers(2, 12),
        "max_lag": st.integers(0, 4),
        "decode_s": st.lists(st.floats(0.05, 2.0), min_size=1, max_size=3),
        "room": st.integers(1, 4),
        "train_s": st.floats(0.05, 1.0),
        "checkpoint_s": st.floats(0.0, 0.5),
        "score_s": st.floats(0.0, 0.5),
        "scorers": st.integers(1, 3),
        "transfer_s": st.floats(0.0, 1.0),
    }
)


@settings(max_examples=60)
@given(plans)
def test_each_second_stands_on_the_path_once(plan: dict[str, object]) -> None:
    run = simulated(**plan)
    begin, end = run.window
    path = critical_path(run)
    assert path[0].begin == pytest.approx(begin, abs=1e-4)
    assert path[-1].end == pytest.approx(end, abs=1e-4)
    assert sum(segment.seconds for segment in path) == pytest.approx(end - begin, abs=1e-3)
    assert all(before.end == pytest.approx(after.begin, abs=1e-4) for before, after in pairwise(path))


@settings(max_examples=60)
@given(plans)
def test_figures_are_shares_and_sums(plan: dict[str, object]) -> None:
    found = analyse(simulated(**plan))
    figures = found.figures
    lanes = [lane for lane in found.run.lanes if lane.is_device]
    seconds = sum(sum(lane.seconds().values()) for lane in lanes)
    assert figures.device_hours == pytest.approx(seconds / 3600)
    assert all(0 <= share <= 1 for share in figures.idle_wait.values())
    for stage, share in figures.idle_wait.items():
        assert sum(figures.idle_by_reason.get(stage, {}).values()) == pytest.approx(share)
    assert sum(figures.lag.values()) == sum(len(step.tasks) for step in found.run.steps)
    assert all(lever.gain > 0 for lever in found.levers)
    assert as_json(found)["bottleneck"]["name"] == found.bottleneck.name


def shape(found: Audit) -> tuple[int, int]:
    assert found.split is not None
    return found.split.now.producers, found.split.recommended.producers


def test_the_split_is_that_of_the_measured_rates() -> None:
    # A producer makes a group a second, the trainer eats eight.
    assert shape(analyse(simulated(decode_s=[1.0], room=1, train_s=0.5))) == (1, 9)
    # A producer makes ten, of which the trainer eats four: though all four look busy, one is enough.
    assert shape(analyse(simulated(decode_s=[0.4] * 4, train_s=1.0))) == (4, 1)


def test_the_recommended_split_works() -> None:
    """Whether a run of that many producers waits no more is asked of the simulation itself."""
    few = analyse(simulated(decode_s=[1.0], room=2, train_s=0.5))
    _, wanted = shape(few)
    then = analyse(simulated(decode_s=[1.0] * wanted, room=2, train_s=0.5))
    assert few.figures.idle_wait["training"] > 0.5
    assert then.figures.idle_wait["training"] < 0.05
    fewer = analyse(simulated(decode_s=[1.0] * (wanted - 1), room=2, train_s=0.5))
    assert fewer.figures.consumed_per_device_hour > 0


def test_what_overlapping_could_save_is_what_a_larger_lag_saves() -> None:
    serial, overlapped = (simulated(max_lag=lag) for lag in (0, 4))
    begin, end = serial.window
    faster = overlapped.window[1] - overlapped.window[0]
    assert analyse(serial).overlap_s == pytest.approx(end - begin - faster, rel=0.1)


def test_a_window_is_of_its_steps_alone() -> None:
    run = simulated(decode_s=[0.4] * 4, train_s=1.0)
    origin = min(lane.pieces[0].begin for lane in run.lanes)
    some = run.between(run.steps[4].formed - origin, run.steps[9].end - origin)
    assert [step.step for step in some.steps] == [step.step for step in run.steps[4:10]]
    found = analyse(some)
    assert sum(found.path_s.values()) == pytest.approx(run.steps[9].end - run.steps[4].formed)
    assert found.bottleneck.name == "too_many_producers"
    assert run.between(None, None).steps == run.steps


@pytest.mark.parametrize(("then_s", "seen"), [(0.5, False), (0.9, True)])
def test_producers_that_were_scaled_and_brought_little_are_seen(then_s: float, seen: bool) -> None:
    """Two producers instead of one after the tenth step, each of which took a second before."""
    run = simulated(decode_s=[0.4, 0.4], steps=20)
    ends = [float(number) for number in range(1, 11)]
    ends += [10.0 + then_s * number for number in range(1, 11)]
    steps = tuple(replace(step, formed=end - 0.1, end=end) for step, end in zip(run.steps, ends, strict=True))
    lanes = [lane for lane in run.lanes if lane.role != "producer"]
    for number, begin in ((1, 0.0), (2, 10.0)):
        lane = next(lane for lane in run.lanes if lane.service == f"producer-{number}" and lane.role == "producer")
        lanes.append(replace(lane, pieces=(Piece(begin, 100.0, "decode"),)))
    found = analyse(replace(run, steps=steps, lanes=tuple(lanes)))
    (sign,) = [sign for sign in found.signs if sign.name.startswith("scaling")]
    assert sign.seen is seen


def test_idle_of_nothing_is_nothing() -> None:
    assert idle_wait({}) == 0.0
    assert idle_wait({"wait_groups": 3.0, "decode": 1.0}) == 0.75
