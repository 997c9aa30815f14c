"""The ledger from records: contiguous lanes, what is lost, what only the newest record says, who waits for whom."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from audit import ledger
from audit.records import Lane

Line = dict[str, Any]


def spans(lane: str, begin: float, *parts: tuple[str, float], pid: int = 1, **more: Any) -> Line:
    return {
        "event": "spans", "lane": lane, "kind": "device", "device": "cpu", "devices": 1, "pid": pid, "host": "a",
        "begin": begin, "spans": [list(part) for part in parts], **more,
    }  # fmt: skip


def exited(service: str, pid: int, at: float, began: float = 0.0) -> Line:
    return {"event": "exited", "service": service, "pid": pid, "code": -9, "began": began, "at": at}


def only(journals: dict[str, list[Line]], **offsets: float) -> Lane:
    (lane,) = ledger.of(journals, offsets).lanes
    return lane


def test_a_killed_process_lost_what_lies_before_its_death() -> None:
    records = [spans("engine", 10.0, ("start", 1.0), ("decode", 2.0)), spans("engine", 13.0, ("decode", 0.5))]
    lane = only({"producer-1": records, "launcher": [exited("producer-1", 1, 14.25), exited("producer-2", 1, 99.0)]})
    assert lane.seconds() == {"start": 1.0, "decode": 2.5, "lost": 0.75}


def test_an_orderly_end_loses_nothing_and_its_exit_is_counted() -> None:
    records = [spans("engine", 10.0, ("decode", 2.0), last=True)]
    assert only({"p": records}).seconds() == {"decode": 2.0}
    assert only({"p": records, "launcher": [exited("p", 1, 12.5, 10.0)]}).seconds() == {"decode": 2.0, "exit": 0.5}


@pytest.mark.parametrize(("next_begin", "lost"), [(12.4, 0.4), (60.0, ledger.UNSEEN_S)])
def test_a_death_that_nobody_saw_is_at_most_a_second_ago_when_the_next_process_begins(
    next_begin: float, lost: float
) -> None:
    records = [spans("engine", 10.0, ("decode", 2.0)), spans("engine", next_begin, ("start", 1.0), pid=2)]
    first, second = ledger.of({"p": records}, {}).lanes
    assert first.seconds() == pytest.approx({"decode": 2.0, "lost": lost})
    assert second.seconds() == {"start": 1.0}


def test_a_record_that_cannot_be_read_leaves_a_loss_and_no_gap() -> None:
    lane = only({"p": [spans("engine", 10.0, ("decode", 1.0)), spans("engine", 12.5, ("decode", 1.0))]})
    assert lane.seconds() == {"decode": 2.0, "lost": 1.5}
    assert all(one.end == two.begin for one, two in pairwise(lane.pieces))


def test_of_a_process_that_wrote_nothing_all_is_lost() -> None:
    records = [spans("engine", 10.0, ("decode", 2.0)), spans("host", 10.0, ("play", 2.0), kind="host", devices=0)]
    ends = [exited("p", 1, 12.5, 10.0), exited("p", 2, 14.5, 13.0), exited("redis", 3, 14.5, 13.0)]
    unseen = [lane for lane in ledger.of({"p": records, "launcher": ends}, {}).lanes if lane.pid == 2]
    assert [(lane.name, lane.seconds(), lane.devices) for lane in unseen] == [("engine", {"lost": 1.5}, 1)]


def test_many_spans_of_microseconds_leave_no_gap() -> None:
    begin = 1_796_071_209_421_631
    lines = []
    for number in range(50):
        parts = [("decode" if place % 2 else "prefill", (123_457 + 7919 * place * number) / 1e6) for place in range(64)]
        lines.append(spans("engine", begin / 1e6, *parts))
        begin += sum(round(1e6 * spent) for _, spent in parts)
    lane = only({"p": lines})
    assert "lost" not in lane.seconds()
    assert lane.pieces[-1].end == pytest.approx(begin / 1e6, abs=1e-6)


def test_still_counts_until_the_next_record_says_more() -> None:
    still = {"event": "still", "lanes": ["engine", "other"], "until": 15.0, "pid": 1, "host": "a"}
    records = [spans("engine", 10.0, ("wait_no_task", 1.0)), still]
    assert only({"p": records}).seconds() == {"wait_no_task": 5.0}
    records.append(spans("engine", 11.0, ("wait_no_task", 2.0), ("decode", 3.0)))
    assert only({"p": records}).seconds() == {"wait_no_task": 3.0, "decode": 3.0}


def test_of_sums_since_the_beginning_the_newest_count() -> None:
    said = [
        {"event": "spans", "service": "far", "cumulative": True, "lane": "engine", "kind": "device", "device": "cuda:0",
         "devices": 2, "pid": 7, "host": "b", "begin": 5.0, "sums": sums}
        for sums in ({"decode": 1.0}, {"decode": 4.0, "wait_no_task": 1.5})
    ]  # fmt: skip
    lane = only({"trainer": said}, far=0.25)
    assert (lane.service, lane.host, lane.devices, lane.pieces[0].begin) == ("far", "b", 2, 5.25)
    assert lane.seconds() == {"decode": 4.0, "wait_no_task": 1.5}
    found = ledger.of({"trainer": said}, {})
    assert found.device_seconds() == {"producer": {"decode": 8.0, "wait_no_task": 3.0}}
    assert found.seconds("far", "engine") == {"decode": 4.0, "wait_no_task": 1.5}


def test_without_a_task_a_producer_waits_for_the_trainer_while_that_works() -> None:
    engine = spans("engine", 10.0, ("wait_no_task", 10.0), ("decode", 1.0), ("wait_no_task", 1.0))
    trainer = spans(
        "trainer", 8.0, ("start", 3.0), ("wait_groups", 2.0), ("forward_backward", 4.0), ("optimizer", 1.0),
        ("wait_groups", 3.5), ("report", 5.0),
    )  # fmt: skip
    lanes = {lane.name: lane for lane in ledger.of({"p": [engine], "trainer": [trainer]}, {}).lanes}
    assert lanes["engine"].seconds() == pytest.approx(
        {"wait_no_task": 3.0 + 2.0 + 0.5, "wait_backpressure": 5.0 + 0.5, "decode": 1.0}
    )
    assert all(one.end == two.begin for one, two in pairwise(lanes["engine"].pieces))
    # A clock that is off by three seconds is put right before anything is compared.
    ahead = {lane.name: lane for lane in ledger.of({"p": [engine], "trainer": [trainer]}, {"trainer": -3.0}).lanes}
    assert ahead["engine"].seconds()["wait_no_task"] == pytest.approx(3.5)


phases = st.sampled_from(["decode", "prefill", "wait_no_task", "swap"])
parts = st.lists(st.tuples(phases, st.integers(0, 2_000_000)), min_size=1, max_size=6)


@given(st.lists(parts, min_size=1, max_size=8), st.integers(0, 900_000), st.booleans(), parts)
def test_a_lanes_pieces_sum_to_its_wall_time(
    records: list[list[tuple[str, int]]], lost: int, whole: bool, trainer: list[tuple[str, int]]
) -> None:
    begin, lines = 1_764_532_800_000_000, []
    at = begin
    for record in records:
        lines.append(spans("engine", at / 1e6, *((phase, spent / 1e6) for phase, spent in record)))
        at += sum(spent for _, spent in record)
    if not whole:
        for line in lines:
            sums: dict[str, float] = {}
            for phase, spent in line["spans"]:
                sums[phase] = sums.get(phase, 0.0) + spent
            line["sums"] = sums
            del line["spans"]
    journals = {
        "p": lines,
        "launcher": [exited("p", 1, (at + lost) / 1e6)],
        "trainer": [spans("trainer", begin / 1e6, *((phase, spent / 1e6) for phase, spent in trainer))],
    }
    found = [lane for lane in ledger.of(journals, {}).lanes if lane.service == "p"]
    if at == begin:
        assert found == []
        return
    assert sum(found[0].seconds().values()) == pytest.approx((at - begin + lost) / 1e6, abs=1e-4)
    assert all(one.end == two.begin for one, two in pairwise(found[0].pieces))
