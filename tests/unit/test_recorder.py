"""What a process writes of its lanes, and what the ledger reads: the same, to the microsecond."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from audit import ledger
from headrace.errors import ServiceError
from headrace.telemetry import clock
from headrace.telemetry.arithmetic import Roofline
from headrace.telemetry.journal import Journal
from headrace.telemetry.phases import Lane, Place
from headrace.telemetry.recorder import Recorder
from tests.support import wait_here

DEVICE = Place("device", "cpu", 1)


class Disk(Journal):
    """One that is full at times."""

    full = False

    def write(self, event: str, **fields: object) -> None:
        if self.full:
            raise ServiceError("no space left")
        super().write(event, **fields)


def lines(folder: Path, event: str) -> list[dict[str, Any]]:
    text = (folder / "p1.jsonl").read_text()
    return [line for line in map(json.loads, text.splitlines()) if line["event"] == event]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    made = Disk(tmp_path / "p1.jsonl")
    yield made
    made.close()


def test_records_of_a_lane_join_and_sum_to_its_wall_time(tmp_path: Path, disk: Disk) -> None:
    lane = Lane("engine", "start", place=DEVICE)
    recorder = Recorder(disk.write, [lane])
    recorder.start()
    for turn in range(400):
        lane.enter("decode" if turn % 2 else "prefill")
        if turn % 100 == 0:
            recorder.tick()
    recorder.close()
    wall = lane.wall()
    written = lines(tmp_path, "spans")
    assert len(written) >= 4
    assert [line.get("last", False) for line in written].count(True) == 1
    seconds = [sum(spent for _, spent in line.get("spans") or line["sums"].items()) for line in written]
    assert any("sums" in line for line in written), "100 turns are too many for one record"
    for (one, spent), (two, _) in pairwise(zip(written, seconds, strict=True)):
        assert one["begin"] + spent == pytest.approx(two["begin"], abs=2e-6)
    assert sum(seconds) <= wall
    (read,) = ledger.read(tmp_path).lanes
    assert sum(read.seconds().values()) == pytest.approx(sum(seconds), abs=2e-6)
    assert (read.service, read.role, read.pid, read.devices) == ("p1", "producer", os.getpid(), 1)


def test_a_lane_that_goes_on_is_said_to_be_still_there(tmp_path: Path, disk: Disk) -> None:
    engine, host = Lane("engine", "decode", place=DEVICE), Lane("host", "play")
    recorder = Recorder(disk.write, [engine, host])
    recorder.tick()
    recorder.tick()
    engine.enter("swap")
    recorder.tick()
    assert [line["lane"] for line in lines(tmp_path, "spans")] == ["engine", "host", "engine"]
    assert [line["lanes"] for line in lines(tmp_path, "still")] == [["engine", "host"], ["host"]]
    read = {lane.name: lane for lane in ledger.read(tmp_path).lanes}
    assert [piece.phase for piece in read["engine"].pieces][:1] == ["decode"]
    assert read["host"].pieces[-1].end == pytest.approx(lines(tmp_path, "still")[-1]["until"], abs=1e-6)
    assert [piece.phase for piece in read["host"].pieces] == ["play"]


def test_what_finds_no_room_is_in_the_next_record(tmp_path: Path, disk: Disk) -> None:
    lane = Lane("engine", "start", place=DEVICE)
    recorder = Recorder(disk.write, [lane])
    recorder.tick()
    disk.full = True
    for phase in ("prefill", "decode", "swap"):
        lane.enter(phase)
        recorder.tick()
    disk.full = False
    recorder.tick()
    first, second = lines(tmp_path, "spans")
    assert [phase for phase, _ in second["spans"]] == ["start", "prefill", "decode", "swap"]
    assert first["begin"] + sum(spent for _, spent in first["spans"]) == pytest.approx(second["begin"], abs=2e-6)


def test_intensity_is_what_was_computed_since_the_record_before(tmp_path: Path, disk: Disk) -> None:
    lane = Lane("engine", "start", place=DEVICE)
    recorder = Recorder(disk.write)
    recorder.add(lane, Roofline(1e12, 1e10, "bfloat16"))
    recorder.start()
    lane.enter("decode")
    lane.did("decode", 100.0, 10.0)
    lane.did("decode", 50.0, 5.0)
    recorder.close()
    (line,) = lines(tmp_path, "intensity")
    assert line["phases"]["decode"]["flop"] == 150
    assert line["phases"]["decode"]["bytes"] == 15
    assert 0 <= line["phases"]["decode"]["seconds"] <= line["end"] - line["begin"] + 1e-3
    assert line["roofline"] == {"flop_per_s": 1e12, "bytes_per_s": 1e10, "dtype": "bfloat16"}
    assert 0 <= line["cpu_s"] <= 60


def test_a_process_knows_when_it_began(tmp_path: Path) -> None:
    code = (
        "import time; time.sleep(0.3); from headrace.telemetry import clock; print(clock.epoch(clock.process_began()))"
    )
    before = time.time()
    began = float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    # A process's age is known to a tick of 10 ms, which is cut off.
    assert before - 0.02 <= began <= time.time() - 0.3


async def test_the_offset_of_a_clock_is_known_to_half_a_round_trip() -> None:
    async def theirs() -> int:
        return round(1000 * (clock.now() + 5.0))

    said = await clock.offset(theirs)
    assert said["offset_s"] == pytest.approx(5.0, abs=said["uncertainty_s"] + 0.001)


DYING = """
import os, signal, sys, time
from pathlib import Path
from headrace.telemetry.clock import process_began
from headrace.telemetry.journal import Journal
from headrace.telemetry.phases import Lane, Place
from headrace.telemetry.recorder import Recorder

lane = Lane("engine", "start", place=Place("device", "cpu", 1))
lane.backdate(process_began())
recorder = Recorder(Journal(Path(sys.argv[1])).write, [lane])
recorder.start()
print("begun", flush=True)
while True:
    lane.enter("decode")
    time.sleep(0.01)
    lane.enter("wait_no_task")
    time.sleep(0.003)
"""


def test_what_a_killed_process_did_not_record_is_lost_up_to_its_death(tmp_path: Path) -> None:
    launcher = Journal(tmp_path / "launcher.jsonl")
    walls = {}
    """Of each process: at least and at most."""
    for stay_s in (0.5, 1.7):
        before = clock.now()
        process = subprocess.Popen(
            [sys.executable, "-c", DYING, str(tmp_path / "producer-1.jsonl")], stdout=subprocess.PIPE, text=True
        )
        after = clock.now()
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        time.sleep(stay_s)
        process.kill()
        process.wait()
        at = clock.now()
        launcher.write("exited", service="producer-1", pid=process.pid, code=-9, began=after, at=at)
        walls[process.pid] = at - after, at - before
        process.stdout.close()
    launcher.close()
    lanes = ledger.read(tmp_path).lanes
    assert {lane.pid for lane in lanes} <= walls.keys()
    for lane in lanes:
        seconds = lane.seconds()
        assert 0 < seconds["lost"] <= 1.1
        least, most = walls[lane.pid]
        # When a process began is known to a tick of 10 ms.
        assert least - 0.01 <= sum(seconds.values()) <= most + 0.01
        assert all(one.end == two.begin for one, two in pairwise(lane.pieces))


def test_the_recorder_writes_by_itself_at_least_once_a_second(tmp_path: Path, disk: Disk) -> None:
    lane = Lane("engine", "start", place=DEVICE)
    recorder = Recorder(disk.write, [lane])
    recorder.start()
    try:
        wait_here(lambda: len(lines(tmp_path, "spans")) + len(lines(tmp_path, "still")) >= 3, "it writes by itself")
    finally:
        recorder.close()
    moments = [line["begin"] for line in lines(tmp_path, "spans")[:1]]
    moments += [line["until"] for line in lines(tmp_path, "still")]
    assert len(moments) >= 3
