"""A lane is in exactly one phase at any time, so its phases sum to its wall time."""

import threading
from functools import reduce
from itertools import pairwise, zip_longest

from hypothesis import given
from hypothesis import strategies as st

from headrace.telemetry.metrics import Metrics
from headrace.telemetry.phases import MOST_SPANS, Cut, Lane, idle_fraction


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


@given(steps, st.lists(st.booleans(), max_size=40))
def test_cuts_join_without_a_gap_and_hold_everything(plan: list[tuple[str, int]], cuts: list[bool]) -> None:
    clock = Clock()
    lane = Lane("engine", "start", clock)
    found: list[Cut] = []
    for step, cut in zip_longest(plan, cuts):
        if step:
            lane.enter(step[0])
            clock.now += step[1] / 1000
        if cut:
            found.append(lane.cut())
    found.append(lane.cut())
    assert all(first.end == second.begin for first, second in pairwise(found))
    whole = reduce(Cut.then, found)
    assert (whole.end - whole.begin) / 1e6 == lane.wall()
    assert {phase: spent / 1e6 for phase, spent in whole.sums.items() if spent} == {
        phase: spent for phase, spent in lane.seconds().items() if spent
    }
    for one in (*found, whole):
        assert sum(one.sums.values()) == one.end - one.begin
        if one.spans is not None:
            assert sum(spent for _, spent in one.spans) == one.end - one.begin
            assert all(first[0] != second[0] for first, second in pairwise(one.spans))
            assert len(one.spans) <= MOST_SPANS


def test_more_spans_than_a_record_may_have_are_summed() -> None:
    clock = Clock()
    lane = Lane("engine", "decode", clock)
    for turn in range(MOST_SPANS + 1):
        clock.now += 1
        lane.enter("prefill" if turn % 2 else "decode")
        clock.now += 1
        lane.enter("swap")
    cut = lane.cut()
    assert (cut.spans, sum(cut.sums.values())) == (None, 2_000_000 * (MOST_SPANS + 1))
    clock.now += 1
    assert lane.cut().spans == (("swap", 1_000_000),)


@given(st.lists(st.tuples(st.sampled_from(["prefill", "recompute", "decode"]), st.floats(0, 1e12)), min_size=1))
def test_phases_that_share_a_time_get_their_shares_and_lose_nothing(shares: list[tuple[str, float]]) -> None:
    clock = Clock()
    lane = Lane("engine", "wait_start", clock)
    lane.enter_shared(shares)
    clock.now += 0.8
    open_ = lane.seconds()
    lane.enter("swap")
    total = sum(share for _, share in shares)
    assert round(1e6 * sum(open_.values())) == 800_000
    assert {phase: spent for phase, spent in lane.seconds().items() if phase != "swap"} == open_
    for phase in {phase for phase, _ in shares} if total else set():
        part = sum(share for name, share in shares if name == phase) / total
        assert abs(open_[phase] - 0.8 * part) <= 2e-6 * len(shares)


def test_a_lane_that_waits_says_for_what_also_when_that_changes_meanwhile() -> None:
    clock = Clock()
    lane = Lane("engine", "start", clock)
    lane.because("no_task")
    assert lane.phase == "start"
    lane.wait()
    clock.now += 1
    lane.because("scores")
    clock.now += 2
    lane.because("scores")
    lane.enter("decode")
    lane.because("drain")
    assert lane.phase == "decode"
    assert lane.seconds() == {"start": 0.0, "wait_no_task": 1.0, "wait_scores": 2.0, "decode": 0.0}


def test_a_lane_that_began_earlier_is_in_its_first_phase_from_then_on() -> None:
    clock = Clock()
    lane = Lane("engine", "start", clock)
    clock.now += 1
    lane.enter("wait_start")
    clock.now += 1
    lane.backdate(97.5)
    lane.backdate(99.0)
    assert lane.wall() == 4.5
    assert lane.seconds() == {"start": 3.5, "wait_start": 1.0}
    cut = lane.cut()
    assert (cut.begin, cut.spans) == (97_500_000, (("start", 3_500_000), ("wait_start", 1_000_000)))


def test_each_phase_that_begins_is_marked() -> None:
    lane = Lane("engine", "start", Clock())
    marks: list[str] = []
    lane.mark = marks.append
    lane.enter("decode")
    lane.enter_shared([("prefill", 1.0), ("decode", 3.0)])
    lane.wait()
    with lane.during("swap"):
        pass
    assert marks == ["decode", "decode", "wait_start", "swap", "wait_start"]


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
    assert "headrace_phase_flop_total{" not in text
    lane.did("decode", 3e9, 2e8)
    text = metrics.render().decode()
    assert f"headrace_phase_flop_total{{{labels}}} 3e+09" in text
    assert f"headrace_phase_bytes_total{{{labels}}} 2e+08" in text


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
