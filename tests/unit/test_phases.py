"""A lane is in exactly one phase at any time, so its phases sum to its wall time."""

import threading

from hypothesis import given
from hypothesis import strategies as st

from headrace.telemetry.metrics import Metrics
from headrace.telemetry.phases import Lane, idle_fraction


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


steps = st.lists(st.tuples(st.sampled_from(["decode", "prefill", "wait_no_task", "swap"]), st.integers(0, 1000)))


@given(steps)
def test_phases_sum_to_wall_time(plan: list[tuple[str, int]]) -> None:
    clock = Clock()
    lane = Lane("engine", "start", clock)
    spent: dict[str, float] = {}
    for phase, ticks in plan:
        lane.enter(phase)
        clock.now += ticks
        spent[phase] = spent.get(phase, 0) + ticks
    seconds = lane.seconds()
    assert sum(seconds.values()) == lane.wall() == sum(spent.values())
    assert {phase: value for phase, value in seconds.items() if value} == {p: v for p, v in spent.items() if v}


def test_during_goes_back_even_after_an_error() -> None:
    clock = Clock()
    lane = Lane("trainer", "wait_groups", clock)
    try:
        with lane.during("optimizer"):
            clock.now += 2
            raise RuntimeError
    except RuntimeError:
        clock.now += 3
    assert lane.phase == "wait_groups"
    assert lane.seconds() == {"wait_groups": 3.0, "optimizer": 2.0}


def test_a_phase_entered_while_another_thread_reads_is_not_in_that_reading() -> None:
    clock = Clock()
    reads, entered = threading.Event(), threading.Event()

    def reader_meets_writer() -> float:
        """The time; in the reading below, the writer gets every chance to enter a phase after it was taken."""
        now = clock.now
        if reads.is_set() and threading.current_thread() is threading.main_thread():
            clock.now += 1
            writer.start()
            entered.wait(0.1)
        return now

    def write() -> None:
        lane.enter("swap")
        entered.set()

    writer = threading.Thread(target=write)
    lane = Lane("engine", "decode", reader_meets_writer)
    clock.now += 2
    reads.set()
    assert lane.seconds() == {"decode": 2.0}
    reads.clear()
    writer.join()
    assert lane.seconds() == {"decode": 3.0, "swap": 0.0}


def test_idle_fraction_of_an_interval() -> None:
    before = {"decode": 10.0, "wait_no_task": 5.0}
    after = {"decode": 16.0, "wait_no_task": 7.0}
    assert idle_fraction(after, before) == 0.25
    assert idle_fraction(before) == 5 / 15
    assert idle_fraction({}) == 0.0


def test_metrics_show_the_open_phase() -> None:
    clock = Clock()
    lane = Lane("engine", "decode", clock)
    metrics = Metrics("run-1", "producer-0")
    metrics.watch(lane)
    clock.now += 1.5
    text = metrics.render().decode()
    labels = 'lane="engine",phase="decode",run="run-1",service="producer-0"'
    assert f"headrace_phase_seconds_total{{{labels}}} 1.5" in text


def test_one_metric_name_has_one_kind_and_many_labels() -> None:
    metrics = Metrics("run-1", "trainer")
    metrics.count("groups", kind="trained")
    metrics.count("groups", 2, kind="stale")
    metrics.gauge("step", 7)
    metrics.observe("lag", 3, buckets=(0, 1, 2, 4))
    text = metrics.render().decode()
    assert 'headrace_groups_total{kind="stale",run="run-1",service="trainer"} 2.0' in text
    assert 'headrace_step{run="run-1",service="trainer"} 7.0' in text
    assert 'headrace_lag_bucket{le="2.0",run="run-1",service="trainer"} 0.0' in text
    assert 'headrace_lag_bucket{le="4.0",run="run-1",service="trainer"} 1.0' in text
