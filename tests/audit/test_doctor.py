"""What the doctor says of what it sees, and what it reads from the ends of journals."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from audit.doctor import Finding, Progress, Seen, Standing, findings, waits
from broker.api import Peer, RunState
from broker.looks import OpenTask, QueueDepths
from deploy.doctor import TAIL_BYTES, as_json, offset_of, progress_of, show, standings, tail

NOW = 1_800_000_000.0


def peer(name: str, role: str, *, alive: bool = True, **state: Any) -> Peer:
    return Peer(name, role, "host", 7, alive, state)  # type: ignore[arg-type]


HEALTHY = Seen(
    run="r",
    folder="runs/r",
    now=NOW,
    state=RunState("running", step=9),
    peers=(
        peer("producer-1", "producer", phase="play", version="1.9"),
        peer("trainer", "trainer", phase="forward_backward"),
        peer("weights", "weights"),
    ),
    depths=QueueDepths(0, 2, 0, 0, 0),
    max_lag=2,
    head="1.9",
    lanes={
        ("producer-1", "host"): Standing("play", NOW - 5, NOW - 0.5),
        ("trainer", "trainer"): Standing("forward_backward", NOW - 1, NOW - 0.5),
    },
    progress={"producer-1": Progress(NOW - 1, 8)},
    offsets={"producer-1": 0.001, "trainer": -0.002},
)


def only(seen: Seen) -> Finding:
    (found,) = findings(seen)
    return found


def test_a_run_that_is_well_has_no_findings() -> None:
    assert (findings(HEALTHY), waits(HEALTHY)) == ([], [])
    out = io.StringIO()
    show(Console(file=out), HEALTHY, [], [])
    assert out.getvalue().endswith("nothing is wrong\n")


def test_who_waits_on_whom_since_when_and_for_which_task() -> None:
    task = OpenTask("t-4", "train", int((NOW - 42) * 1000), "producer-1", 1)
    seen = replace(
        HEALTHY,
        tasks=(task, replace(task, task_id="e-1", kind="eval")),
        lanes={**HEALTHY.lanes, ("trainer", "trainer"): Standing("wait_groups", NOW - 12, NOW - 0.5)},
    )
    (wait,) = waits(seen)
    assert (wait.who, wait.what, wait.whom, wait.for_s) == ("trainer", "groups", "producer-1", 12.0)
    assert wait.ids == ("task t-4, with producer-1, admitted 42 s ago",)
    finding = only(seen)
    assert finding.grade == "slow"
    assert finding.sentence.startswith("trainer waits for groups on producer-1, for 12 s (task t-4, with producer-1")
    untaken = replace(seen, tasks=(replace(task, holder=""),))
    assert only(untaken).command == "headrace scale producer 2 --run r"
    brief = replace(seen, lanes={("trainer", "trainer"): Standing("wait_groups", NOW - 2, NOW - 0.5)})
    assert findings(brief) == []


def test_a_producer_that_waits_for_weights_says_for_which() -> None:
    lanes = {("producer-1", "host"): Standing("wait_behind_on_weights", NOW - 30, NOW - 0.5)}
    (wait,) = waits(replace(HEALTHY, lanes=lanes))
    assert (wait.what, wait.ids, wait.for_s) == ("newer weights", ("version 1.9",), 30.0)
    assert only(replace(HEALTHY, lanes=lanes)).command == "headrace weights list --run r"


def test_what_a_lane_recorded_is_newer_than_a_heartbeat() -> None:
    peers = (peer("trainer", "trainer", phase="wait_groups"), peer("producer-1", "producer", phase="play"))
    assert waits(replace(HEALTHY, peers=peers)) == []


def test_without_the_folder_the_wait_is_told_without_its_time() -> None:
    peers = (peer("producer-1", "producer", phase="wait_no_task"), peer("trainer", "trainer"))
    (wait,) = waits(replace(HEALTHY, lanes={}, peers=peers))
    assert (wait.who, wait.what, wait.for_s) == ("producer-1", "a task", None)


@pytest.mark.parametrize(
    ("change", "grade", "said", "command"),
    [
        ({"depths": QueueDepths(0, 0, 0, 0, 2)}, "slow", "2 dead letters", "headrace dead list"),
        ({"memory": (95 << 20, 100 << 20)}, "slow", "95 MiB of its maxmemory of 100 MiB", "redis-cli"),
        ({"offsets": {"producer-1": 3.0}}, "slow", "producer-1 is 3.0 s behind the broker's", "timedatectl"),
        ({"skew_s": 2.0}, "slow", "this machine is 2.0 s ahead of the broker's", "timedatectl"),
        ({"refusal": "Redis is full"}, "fault", "no heartbeat passes", "df -h"),
        ({"unbalanced": ("train",)}, "fault", "sheet of train tasks does not close", "headrace status"),
        ({"progress": {"producer-1": Progress(NOW - 40, 8)}}, "fault", "no token for 40 s, with 8 sequences", "tail"),
        ({"state": RunState("running", step=14)}, "slow", "5 versions behind", "headrace weights list"),
        ({"state": RunState("finished")}, "fine", "the run is finished", "headrace audit r"),
        (
            {"lanes": {("trainer", "trainer"): Standing("optimizer", NOW - 9, NOW - 8)}},
            "fault", "trainer has recorded nothing for 8.0 s", "tail runs/r/logs/trainer.log",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_the_next_command(
    change: dict[str, Any], grade: str, said: str, command: str
) -> None:
    finding = only(replace(HEALTHY, **change))
    assert finding.grade == grade
    assert said in finding.sentence
    assert finding.command.startswith(command)


def test_an_idle_engine_is_not_stuck() -> None:
    assert findings(replace(HEALTHY, progress={"producer-1": Progress(NOW - 40, 0)})) == []


def test_services_that_are_missing_or_in_trouble_are_faults() -> None:
    trouble = {"kind": "checkpoint", "reason": "the disk is full", "since": NOW - 60}
    peers = (
        peer("producer-1", "producer", alive=False),
        peer("trainer", "trainer", troubles=[trouble], event_loop_lag_s=0.9),
    )
    found = findings(replace(HEALTHY, peers=peers, lanes={}))
    assert [finding.grade for finding in found] == ["fault", "fault", "slow", "slow"]
    assert [finding.sentence for finding in found] == [
        "no producer is alive: nothing is generated",
        "trainer, for 60 s: the disk is full",
        "producer-1 fell silent",
        "the event loop of trainer woke up 0.9 s late: something in it blocks, or its core is shared",
    ]
    assert only(replace(HEALTHY, peers=())).sentence == "no service is alive"


def spans(begin: float, *phases: tuple[str, float], pid: int = 7, **more: Any) -> dict[str, Any]:
    return {"event": "spans", "lane": "host", "pid": pid, "host": "a", "begin": begin, "spans": list(phases), **more}


def test_a_phase_lasts_over_records() -> None:
    lines = [
        spans(10.0, ("play", 0.5), ("wait_no_task", 0.5)),
        spans(11.0, ("wait_no_task", 1.0)),
        {"event": "clock", "offset_s": 0.25},
    ]
    assert dict(standings("p", lines)) == {("p", "host"): Standing("wait_no_task", 10.75, 12.25)}


def test_lanes_that_stay_where_they_are_share_a_line() -> None:
    lines = [
        spans(10.0, ("wait_no_task", 1.0)),
        {"event": "still", "lanes": ["host", "score/sums/0"], "until": 14.0, "pid": 7, "host": "a"},
        {"event": "still", "lanes": ["host"], "until": 99.0, "pid": 8, "host": "a"},
    ]
    assert dict(standings("p", lines)) == {("p", "host"): Standing("wait_no_task", 10.0, 14.0)}


def test_a_new_process_begins_anew_and_one_that_ended_stands_nowhere() -> None:
    lines = [spans(10.0, ("play", 1.0)), spans(20.0, ("play", 1.0), pid=8)]
    assert dict(standings("p", lines)) == {("p", "host"): Standing("play", 20.0, 21.0)}
    assert dict(standings("p", [*lines, spans(21.0, ("play", 1.0), pid=8, last=True)])) == {}


def test_sums_tell_where_a_lane_was_most() -> None:
    line = {**spans(10.0), "sums": {"decode": 0.7, "wait_no_task": 0.2}}
    (standing,) = dict(standings("p", [line])).values()
    assert standing.phase == "decode"
    assert standing.written == pytest.approx(10.9)


def test_progress_is_since_the_newest_token() -> None:
    states = [
        {"event": "state", "time": float(moment), "decoded_tokens": tokens, "busy_slots": 3}
        for moment, tokens in ((1, 10), (2, 20), (3, 20), (4, 20))
    ]
    assert progress_of(states) == Progress(2.0, 3)
    assert progress_of([{"event": "swap"}]) is None
    assert offset_of(states) is None


def test_the_end_of_a_long_journal_is_read(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    rows = [json.dumps({"event": "state", "number": number}) for number in range(TAIL_BYTES // 16)]
    file.write_text("\n".join(rows) + '\n{"event": "sta')
    numbers = [line["number"] for line in tail(file)]
    assert numbers == list(range(numbers[0], len(rows)))
    assert numbers[0] > 0


def test_all_of_it_is_json() -> None:
    seen = replace(HEALTHY, depths=QueueDepths(0, 0, 0, 0, 1))
    told = json.loads(json.dumps(as_json(seen, waits(seen), findings(seen))))
    assert told["findings"] == [
        {
            "grade": "slow",
            "sentence": "1 dead letter: entries that nobody could use",
            "command": "headrace dead list --run r",
        }
    ]
