"""A run's folder as `docs/audit.md` describes it, read into typed records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from audit.analysis import analyse
from audit.reading import read
from audit.records import step_of
from headrace.errors import ConfigError, ServiceError

CONFIG = {"staleness": {"max_lag": 2}, "trainer": {"groups_per_step": 1}}


def write(folder: Path, journal: str, *lines: dict[str, Any]) -> None:
    with (folder / f"{journal}.jsonl").open("a") as stream:
        stream.writelines(json.dumps({"time": 0.0, **line}) + "\n" for line in lines)


def spans(lane: str, begin: float, *phases: tuple[str, float], **more: Any) -> dict[str, Any]:
    who = {"pid": 1, "host": "a", "kind": "device", "device": "cpu", "devices": 1}
    return {"event": "spans", "lane": lane, "begin": begin, "spans": list(phases), "last": True, **who, **more}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two steps of one group each; the producer's clock is 100 s behind the broker's."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    write(
        tmp_path,
        "trainer",
        spans("trainer", 1000.0, ("start", 1.0), ("wait_groups", 2.0), ("forward_backward", 1.0), ("wait_groups", 1.0),
              ("forward_backward", 1.0)),
        {"event": "admitted", "time": 1001.0, "tasks": ["t-0", "t-1"], "step": 0},
        {"event": "publish", "version": "1.0", "begin": 1000.5, "end": 1001.0, "nbytes": 8, "published": True},
        {"event": "publish", "version": "1.1", "begin": 1004.0, "end": 1004.0, "nbytes": 8, "published": False},
        {"event": "trained", "step": 1, "version": "1.1", "tasks": ["t-0"], "begin": 1003.0, "end": 1004.0},
        {"event": "trained", "step": 2, "version": "1.2", "tasks": ["t-1"], "begin": 1005.0, "end": 1006.0},
        {"event": "stale", "task": "t-9", "reason": "lag 3"},
    )  # fmt: skip
    for step in (1, 2):
        write(
            tmp_path, "steps",
            {"event": "step", "step": step, "version": f"1.{step}", "rollouts": 4, "loss_tokens": 40, "reward": 0.5,
             "lag_histogram": {"0": 1}, "seconds": 1.0, "time": 1002.0 + 2 * step},
        )  # fmt: skip
    at = {"taken": 901.5, "first_token": 902.0, "decoded": 902.5, "scored": 902.9, "published": 903.0}
    common = {"event": "group", "kind": "train", "outcome": "published", "rewards": [1, 0, 1, 0], "tokens": 40}
    write(
        tmp_path,
        "producer-1",
        {"event": "clock", "offset_s": 90.0, "uncertainty_s": 5.0},
        {"event": "clock", "offset_s": 100.0, "uncertainty_s": 0.001},
        spans("engine", 900.0, ("wait_start", 2.0), ("decode", 4.0), device="simulated"),
        {"event": "swap", "version": "1.0", "arrived": 901.1, "verified": 901.6, "begin": 901.7, "end": 901.8,
         "sealed": 1001.1, "nbytes": 8},
        {**common, "task": "t-0", "at": at, "device_s": 0.5},
        {**common, "task": "t-1", "at": {name: moment + 2 for name, moment in at.items()}, "device_s": 0.5},
        {"event": "wasted", "tokens": 7, "reason": "stale", "device_s": 0.25},
    )  # fmt: skip
    with (tmp_path / "producer-1.jsonl").open("a") as stream:
        stream.write('{"event": "spa')
    return tmp_path


def test_all_clocks_are_the_brokers(folder: Path) -> None:
    run = read(folder)
    assert run.offsets == {"a": 50.0}, "of two services, as this is one host"
    first, second = run.groups
    assert (first.task, first.admitted, first.taken, first.published) == ("t-0", 1001.0, 1001.5, 1003.0)
    assert first.ready == 1001.8, "the version came after the task was taken"
    assert second.ready == second.taken == 1003.5
    (swap,) = run.swaps
    assert swap.latency_s == pytest.approx(0.7)
    assert [(lane.service, lane.role, lane.pieces[0].begin) for lane in run.lanes] == [
        ("producer-1", "producer", 1000.0),
        ("trainer", "trainer", 1000.0),
    ]


def test_steps_have_their_tasks_and_their_lines(folder: Path) -> None:
    run = read(folder)
    assert [(s.step, s.formed, s.end, s.tasks, s.rollouts) for s in run.steps] == [
        (1, 1003.0, 1004.0, ("t-0",), 4),
        (2, 1005.0, 1006.0, ("t-1",), 4),
    ]
    assert run.window == (1003.0, 1006.0)
    assert [publish.version for publish in run.publishes] == ["1.0"], "one that found no room is none"
    assert run.dropped == {"t-9": "stale"}
    assert run.wasted_device_s == 0.25


def test_the_whole_audit_comes_from_it(folder: Path) -> None:
    found = analyse(read(folder))
    assert sum(found.path_s.values()) == pytest.approx(3.0)
    assert found.figures.consumed == 8
    assert found.figures.device_hours_by_phase["generation"] == {
        "wait_start": pytest.approx(2 / 3600),
        "decode": pytest.approx(4 / 3600),
    }


def test_a_step_that_was_made_anew_counts_once_and_a_rollback_not(folder: Path) -> None:
    write(folder, "steps", {"event": "step", "step": 2, "version": "2.2", "rollouts": 3, "time": 1010.0})
    write(folder, "steps", {"event": "step", "step": 3, "version": "2.3", "restored": "1.1", "time": 1011.0})
    run = read(folder)
    assert [(step.step, step.version, step.rollouts) for step in run.steps] == [(1, "1.1", 4), (2, "2.2", 3)]


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no run: it has no config\.json"):
        read(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds no records of lanes"):
        read(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ServiceError, match="is not a JSON object"):
        read(tmp_path)


def test_versions_have_steps() -> None:
    assert [step_of(version) for version in ("2.17", "", "1.")] == [17, -1, -1]
