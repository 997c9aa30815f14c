"""What the audit recommends, applied to the live run by the command that it names; and its commands on a real run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from audit.figures import idle_wait, stage_seconds
from audit.reading import read
from tests.launches import Launches
from tests.support import wait_here

PATIENCE_S = 200.0
CONFIG = """
[run]
steps = 1000

[model]
path = "{model}"
context_length = 96

[[environments]]
name = "tests/audit/slow.py:Sums"

[sampling]
max_new_tokens = 32

[producer]
count = 1
engine = "scripted"
engine_options = {{ length_mean = 16.0, length_sigma = 0.1, step_s = 0.04 }}
slots = 4
lease_s = 2
drain_s = 1

[trainer]
groups_per_step = 2
group_size = 4
autocast = "off"
loss = "tests/audit/paused.py:paused"

[checkpoint]
every = 1000

[broker]
stream_block_ms = 300
"""


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Launches]:
    made = Launches(tmp_path)
    yield made
    made.close()


@pytest.mark.timeout(600)
def test_the_recommended_producers_keep_the_trainer_busy(launched: Launches, tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(CONFIG.format(model=tiny_model))
    process = launched.up("--config", str(file), "--run", "live")

    def steps(more: int) -> tuple[float, float]:
        """Make so many more; from when to when that was."""
        begun = len(launched.steps())
        wait_here(
            lambda: process.poll() is not None or len(launched.steps()) >= begun + more, "steps are made", PATIENCE_S
        )
        assert process.poll() is None, process.communicate()
        made = read(launched.run).steps
        return made[begun].end, made[-1].end

    def trainer_idle(begin: float, end: float) -> float:
        return idle_wait(stage_seconds(read(launched.run), "trainer", begin, end))

    assert trainer_idle(*steps(8)) > 0.3
    told = json.loads(launched.headrace("audit", "live", "--json").stdout)
    assert told["bottleneck"]["name"] == "too_few_producers"
    wanted = told["split"]["recommended"]["producers"]
    assert told["levers"][0]["how"] == f"`headrace scale producer {wanted}`"
    scaled = launched.headrace("scale", "producer", str(wanted))
    assert scaled.stdout.startswith(f"{wanted} producers: "), scaled.stderr
    steps(4)
    assert trainer_idle(*steps(12)) < 0.05
    the_doctor_sees_it(launched)
    assert launched.headrace("stop").returncode == 0
    process.communicate(timeout=PATIENCE_S)
    its_files_are_written(launched, tmp_path)


def the_doctor_sees_it(launched: Launches) -> None:
    told = json.loads(launched.headrace("doctor", "--json").stdout)
    assert (told["run"], told["status"]) == ("live", "running")
    assert [finding for finding in told["findings"] if finding["grade"] == "fault"] == []
    waiting = {wait["who"]: wait for wait in told["waits"]}
    assert set(waiting) <= {"trainer"} | {f"producer-{number}" for number in range(1, 20)}
    assert all(wait["for_s"] is not None for wait in waiting.values())


def its_files_are_written(launched: Launches, folder: Path) -> None:
    page, timeline = folder / "audit.html", folder / "trace.json"
    shown = launched.headrace("audit", str(launched.run), "--html", str(page))
    assert shown.returncode == 0, shown.stderr
    assert "What to change next" in shown.stdout
    assert page.read_text().startswith("<!doctype html>")
    traced = launched.headrace("trace", "live", "--out", str(timeline))
    assert traced.returncode == 0, traced.stderr
    made = json.loads(timeline.read_text())["traceEvents"]
    tracks = {event["args"]["name"] for event in made if event["name"] == "thread_name"}
    assert {"engine", "host", "trainer", "steps", "admission", "group 1"} <= tracks
    assert {event["cat"] for event in made if event["ph"] == "f"} == {"task", "version"}
    same = launched.headrace("audit", "live", "live")
    assert same.stdout.startswith("the change made no difference")


def test_what_is_not_there_is_refused_with_a_way_out(launched: Launches) -> None:
    for arguments, said in (
        (("audit", "nowhere"), "there is no run nowhere"),
        (("audit", "a", "b", "--html", "x"), "--html shows one run"),
        (("trace", "a", "--from", "5", "--to", "4"), "--from 5 is not before --to 4"),
        (("doctor",), "no run is running"),
    ):
        answer = launched.headrace(*arguments)
        assert answer.returncode == 2
        assert said in answer.stderr
        assert "Traceback" not in answer.stderr
