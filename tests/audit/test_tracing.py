"""The timeline: its tracks, its arrows, its clock, and its window."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from typing import Any

from audit.trace import trace
from tests.audit.simulated import simulated

RUN = simulated(decode_s=[0.4, 0.6], steps=6)


def events(ph: str, made: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in made["traceEvents"] if event["ph"] == ph]


def test_every_lane_is_a_track_with_all_its_seconds() -> None:
    made = json.loads(json.dumps(trace(RUN)))
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events("M", made) if e["name"] == "thread_name"}
    processes = {e["pid"]: e["args"]["name"] for e in events("M", made) if e["name"] == "process_name"}
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    for event in events("X", made):
        seconds[processes[event["pid"]], names[event["pid"], event["tid"]]] += event["dur"] / 1e6
    for lane in RUN.lanes:
        recorded = sum(lane.seconds().values())
        assert abs(seconds[f"{lane.service} (pid {lane.pid} on {lane.host})", lane.name] - recorded) < 1e-3


def test_slices_of_a_track_do_not_overlap() -> None:
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    made = trace(RUN)
    loose = {e["tid"] for e in events("M", made) if e["args"]["name"] in ("admission", "versions")}
    for event in events("X", made):
        if event["tid"] not in loose:
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for slices in tracks.values():
        ordered = sorted(slices)
        assert all(after[0] >= before[1] - 2 for before, after in pairwise(ordered))


def test_groups_have_as_many_tracks_as_were_in_play_at_once() -> None:
    tracks = {e["args"]["name"] for e in events("M", trace(RUN)) if e["name"] == "thread_name"}
    at_once = max(
        sum(other.taken <= group.taken < other.published for other in RUN.groups if other.producer == group.producer)
        for group in RUN.groups
    )
    assert len(RUN.groups) > at_once
    assert sum(name.startswith("group ") for name in tracks) == at_once


def test_a_task_leads_from_its_admission_to_its_step() -> None:
    made = trace(RUN)
    step = RUN.steps[2]
    origin = made["otherData"]["origin_epoch_s"]
    for task in step.tasks:
        arrow = [event for event in made["traceEvents"] if event.get("id") == f"task {task}"]
        assert [event["ph"] for event in sorted(arrow, key=lambda event: event["ts"])] == ["s", "t", "t", "t", "f"]
        assert abs(arrow[-1]["ts"] / 1e6 + origin - step.formed) < 1e-5


def test_every_swap_has_an_arrow_from_its_publish() -> None:
    made = trace(RUN)
    ends = {event["id"] for event in events("f", made) if event["cat"] == "version"}
    assert ends == {f"version {swap.version} to {swap.producer}" for swap in RUN.swaps}


def test_a_window_has_no_arrow_to_nowhere() -> None:
    made = trace(RUN, 1.0, 2.0)
    assert len(made["traceEvents"]) < len(trace(RUN)["traceEvents"])
    for event in events("X", made):
        assert event["ts"] <= 2e6
        assert event["ts"] + event["dur"] >= 1e6
    sides: dict[str, set[str]] = defaultdict(set)
    for event in made["traceEvents"]:
        if event["ph"] in "stf":
            sides[event["id"]].add(event["ph"])
    assert sides
    assert all({"s", "f"} <= found for found in sides.values())


def test_a_group_that_no_step_used_has_no_arrow() -> None:
    unused = replace(RUN, steps=RUN.steps[:1])
    ends = {event["id"] for event in events("f", trace(unused)) if event["cat"] == "task"}
    assert ends == {f"task {task}" for task in RUN.steps[0].tasks}
