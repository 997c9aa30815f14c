"""What the trainer writes about steps and the run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from broker.api import Balance, Peer
from broker.looks import QueueDepths
from broker.messages import Group, GroupDelivery, Trajectory, VersionSpan
from consumers.batch import Batch
from consumers.drift import Drift
from consumers.evaluation import Result
from consumers.progress import Progress, difference
from consumers.trainer import StepResult
from headrace.errors import ServiceError
from headrace.telemetry.metrics import Metrics
from headrace.telemetry.phases import Lane
from headrace.version import PolicyVersion


def group(index: int, *rewards: float, kind: str = "eval") -> Group:
    mask = np.array([False, False, True, True])
    spans = (VersionSpan(2, 4, PolicyVersion(1, 0)),)
    members = tuple(
        Trajectory(np.array([1, 2, 30 + index, 4], np.int32), np.zeros(4, np.float32), mask, spans, reward, "stop")
        for reward in rewards
    )
    return Group(f"e{index}", 1, "eval" if kind == "eval" else "train", "sums", index, "p", members)


def test_difference_of_phases() -> None:
    assert difference({"a": 3.0, "b": 1.0, "c": 2.0}, {"a": 1.0, "b": 1.0}) == {"a": 2.0, "c": 2.0}


def result(**more: object) -> StepResult:
    fields = {
        "loss": 0.5,
        "grad_norm": 2.0,
        "reward": 0.25,
        "accuracy": 0.5,
        "rollouts": 4,
        "without_advantage": 2,
        "tokens": 100,
        "packed_tokens": 40,
        "loss_tokens": 10,
        "learning_rate": 1e-5,
        "drift": Drift(mismatch=0.01, clipped=0.1, ratios=(0.5, 1.0, 1.5), engine_kl=0.002, engine_tokens=7),
        "skipped": "",
    }
    return StepResult(**{**fields, **more})  # type: ignore[arg-type]


def producer(name: str, **state: object) -> Peer:
    return Peer(name, "producer", "here", 1, True, dict(state))


def test_steps_and_summary(tmp_path: Path) -> None:
    now = 0.0

    def clock() -> float:
        return now

    lane = Lane("trainer", "load", clock)
    metrics = Metrics("r", "trainer")
    progress = Progress(tmp_path, lane, metrics, 1, ("sums",))
    now = 5.0
    assert progress.cold
    lane.enter("train")
    progress.warm([producer("p1", seconds={"decode": 10.0})])
    assert not progress.cold
    now = 8.0
    lane.enter("wait_groups")
    now = 9.0
    deliveries = tuple(GroupDelivery(f"{i}-0", 7, group(i, 1, 0, kind="train")) for i in range(2))
    batch = Batch(PolicyVersion(1, 3), deliveries, (1, 4), ())
    peers = [
        producer("p1", seconds={"decode": 12.0, "wait_no_task": 1.0}, idle=0.25, tokens_per_s=300.0),
        producer("p2", seconds={"decode": 1.0}, idle=0.75, tokens_per_s=100.0),
        producer("p3"),
    ]
    progress.step(batch, result(skipped="the loss is not finite"), peers)
    sheet = Balance("train", 3, 1, {"trained": 2})
    summary = progress.summary(
        None, Result(8, 0.75, 0, {"1": 0.75}), [{"version": "1.3"}], [sheet], 3, tmp_path / "model"
    )
    progress.close()

    (line,) = [json.loads(text) for text in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert (line["step"], line["lag"], line["lag_histogram"]) == (3, 2.5, {"1": 1, "4": 1})
    assert line["idle_wait"] == {"trainer": 0.1111, "producers": 0.5}
    assert (line["generated_tokens_per_s"], line["accuracy"]) == (400.0, 0.5)
    assert (summary["accuracy_before"], summary["accuracy_after"], summary["steps"]) == (None, 0.75, 3)
    assert summary["seconds"] == {
        "trainer": {"train": 3.0, "wait_groups": 1.0},
        "producers": {"decode": 3.0, "wait_no_task": 1.0},
    }
    assert summary["idle_wait"] == {"trainer": 0.25, "producers": 0.25}
    assert summary["evaluations"] == [{"version": "1.3"}]
    assert summary["balance"]["train"]["closed"]
    text = metrics.render().decode()
    assert 'headrace_trainer_steps_total{outcome="the loss is not finite",run="r",service="trainer"} 1.0' in text
    assert 'headrace_trainer_lag_bucket{le="3.0",run="r",service="trainer"} 1.0' in text
    assert 'headrace_phase_seconds_total{lane="trainer",phase="wait_groups"' in text


def test_producers_that_say_only_how_idle_they_are(tmp_path: Path) -> None:
    progress = Progress(tmp_path, Lane("trainer", "load"), Metrics("r", "trainer"), 1, ())
    progress.warm([])
    batch = Batch(PolicyVersion(1, 1), (GroupDelivery("1-0", 7, group(1, 1)),), (0,), ())
    progress.step(batch, result(accuracy=None), [producer("p1", idle=0.5)])
    assert progress.summary(None, None, [], [], 1, tmp_path)["idle_wait"]["producers"] == 0.5
    progress.close()
    assert json.loads((tmp_path / "steps.jsonl").read_text())["accuracy"] is None


def test_a_step_whose_trainer_died_before_its_line_gets_it_when_it_is_made_again(tmp_path: Path) -> None:
    def batch(incarnation: int, step: int) -> Batch:
        delivery = GroupDelivery("1-0", 7, group(1, 1, kind="train"))
        return Batch(PolicyVersion(incarnation, step), (delivery,), (0,), ())

    first = Progress(tmp_path, Lane("trainer", "load"), Metrics("r", "trainer"), 1, ())
    first.step(batch(1, 1), result(), [])
    first.step(batch(1, 2), result(), [])
    first.close()
    with (tmp_path / "steps.jsonl").open("a") as stream:
        stream.write('{"time": 1.0, "event": "st')
    second = Progress(tmp_path, Lane("trainer", "load"), Metrics("r", "trainer"), 2, ())
    for step in (2, 3):
        second.replayed(batch(1, step), result(), [])
    second.step(batch(2, 4), result(), [])
    second.close()
    lines = [json.loads(text) for text in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [line["version"] for line in lines] == ["1.1", "1.2", "1.3", "2.4"]
    again = [json.loads(text)["step"] for text in (tmp_path / "trainer.jsonl").read_text().splitlines()]
    assert again == [2, 3]


def test_a_rollback_has_a_line_without_figures(tmp_path: Path) -> None:
    metrics = Metrics("r", "trainer")
    progress = Progress(tmp_path, Lane("trainer", "load"), metrics, 1, ())
    progress.restored(Batch(PolicyVersion(1, 5), (), (), restored=PolicyVersion(1, 2)))
    progress.replayed(Batch(PolicyVersion(1, 5), (), (), restored=PolicyVersion(1, 2)), None, [])
    progress.replayed(Batch(PolicyVersion(1, 6), (), (), restored=PolicyVersion(1, 3)), None, [])
    progress.close()
    lines = [json.loads(text) for text in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [(line["version"], line["restored"]) for line in lines] == [("1.5", "1.2"), ("1.6", "1.3")]
    assert lines[0]["skipped"] == "the weights are those of version 1.2 again"
    events = [json.loads(text) for text in (tmp_path / "trainer.jsonl").read_text().splitlines()]
    assert [(event["step"], event["restored"]) for event in events] == [(5, "1.2"), (6, "1.3")]
    assert 'headrace_trainer_steps_total{outcome="restored",run="r",service="trainer"} 2.0' in metrics.render().decode()


def test_a_folder_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ServiceError, match="cannot be written"):
        Progress(tmp_path / "file", Lane("trainer", "load"), Metrics("r", "trainer"), 1, ())


def test_metrics_say_what_the_broker_holds(tmp_path: Path) -> None:
    metrics = Metrics("r", "trainer")
    progress = Progress(tmp_path, Lane("trainer", "load"), metrics, 1, ())
    progress.bounds(4, 1 << 20)
    sheets = [Balance("train", 7, 2, {"trained": 4, "dead": 1}), Balance("eval", 3, 0, {"trained": 2})]
    progress.broker(sheets, QueueDepths(1, 2, 3, 4, 5), 100, 200)
    progress.close()
    said = metrics.render().decode()
    for line in (
        'balance_tasks{kind="train",row="admitted",run="r",service="trainer"} 7.0',
        'balance_tasks{kind="train",row="trained",run="r",service="trainer"} 4.0',
        'balance_open{kind="train",run="r",service="trainer"} 0.0',
        'balance_open{kind="eval",run="r",service="trainer"} 1.0',
        'queue_entries{queue="tasks_held",run="r",service="trainer"} 2.0',
        'queue_entries{queue="dead",run="r",service="trainer"} 5.0',
        'broker_memory_limit_bytes{run="r",service="trainer"} 200.0',
        'trainer_max_lag{run="r",service="trainer"} 4.0',
    ):
        assert f"headrace_{line}" in said, line
