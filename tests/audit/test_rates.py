"""What a producer could make with all slots full, and how intensely devices were used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from audit.intensity import processes, uses
from audit.rates import full_rate
from audit.records import Beat, Lane, Piece, Run
from audit.split import Choice, split_of
from tests.audit.simulated import simulated

SLOTS = 8


def run_of(step_s: Callable[[float], float], occupancies: list[float]) -> Run:
    """A producer whose steps take so long at an occupancy; one second at each."""
    beats, tokens = [Beat("p", 0.0, 0, 0.0, 0.0)], 0.0
    for second, occupancy in enumerate(occupancies, 1):
        tokens += occupancy * SLOTS / step_s(occupancy)
        beats.append(Beat("p", float(second), round(tokens * 1000), occupancy, 0.0))
    # Whole tokens: a thousand times as many, so that rounding says nothing.
    lane = Lane("p", "producer", "engine", "device", "a", 1, (Piece(0.0, float(len(occupancies)), "decode"),))
    return Run("r", {}, (lane,), beats=tuple(beats))


@given(
    st.lists(st.floats(0.1, 1.0), min_size=2, max_size=20),
    st.floats(0.01, 0.1),
    st.floats(0.0, 0.1),
)
def test_a_rate_at_full_slots_is_found_from_partly_filled_ones(
    occupancies: list[float], constant: float, slope: float
) -> None:
    def step_s(occupancy: float) -> float:
        return constant + slope * occupancy

    found = full_rate(run_of(step_s, occupancies), "p") / 1000
    most = SLOTS / step_s(min(occupancies))
    assert SLOTS / step_s(1.0) <= found * 1.001
    assert found <= most * 1.001
    if max(occupancies) - min(occupancies) > 0.5:
        assert found == pytest.approx(SLOTS / step_s(1.0), rel=0.01)


def test_a_producer_that_never_worked_has_no_rate() -> None:
    lane = Lane("p", "producer", "engine", "device", "a", 1, (Piece(0.0, 1.0, "wait_no_task"),))
    assert full_rate(Run("r", {}, (lane,)), "p") == 0.0


def test_more_producers_never_promise_fewer_samples_per_second() -> None:
    from audit.rates import rates

    split = split_of(rates(simulated(decode_s=[1.0], room=2)))
    assert split is not None
    paces = [choice.samples_per_s for choice in split.table]
    assert paces == sorted(paces)
    assert all(isinstance(choice, Choice) and choice.trainer_idle >= 0 for choice in split.table)
    assert split.recommended.trainer_idle == pytest.approx(0.0)
    assert split.gain > 1


def test_without_a_step_no_number_of_producers_is_recommended() -> None:
    from audit.rates import rates

    run = simulated(decode_s=[1.0], room=2)
    assert split_of(rates(replace(run, steps=()))) is None


def line(phase: str, seconds: float, flop: float, nbytes: float, **more: object) -> dict[str, object]:
    known = {"service": "trainer", "lane": "trainer", "pid": 1, "begin": 0.0, "end": 10.0, "cpu_s": 5.0}
    did = {"seconds": seconds, "flop": flop, "bytes": nbytes}
    return {**known, "phases": {phase: did}, "roofline": {"flop_per_s": 100.0, "bytes_per_s": 10.0}, **more}


def test_a_phase_is_measured_against_what_its_devices_can() -> None:
    slow = {"flop_per_s": 50.0, "bytes_per_s": 10.0}
    found = uses([line("decode", 2.0, 20.0, 10.0), line("decode", 2.0, 20.0, 10.0, roofline=slow)])
    (use,) = found
    assert (use.phase, use.seconds, use.flop_per_s, use.bytes_per_s) == ("decode", 4.0, 10.0, 5.0)
    assert use.of_flop == pytest.approx(40 / 300)
    assert use.of_bytes == use.of_peak == pytest.approx(0.5)


def test_what_nobody_measured_has_no_share() -> None:
    (use,) = uses([line("decode", 2.0, 20.0, 10.0, roofline={})])
    assert (use.of_flop, use.of_bytes, use.of_peak) == (None, None, None)
    assert uses([line("wait_groups", 2.0, 0.0, 0.0)]) == []


def test_a_process_counts_once_however_many_lanes_it_has() -> None:
    gpu = {"sm": 0.5, "memory": 0.25, "memory_bytes": 1e9}
    ours = line("a", 1, 1, 1, nvml=gpu, dcgm={"dram_active": 0.75})
    found = processes([ours, line("a", 1, 1, 1, lane="other"), line("a", 1, 1, 1, cpu_s=10.0)])
    (process,) = found
    assert (process.service, process.cpu) == ("trainer", 0.75)
    assert process.gpu == {"sm": 0.5, "memory": 0.25, "dram_active": 0.75}
