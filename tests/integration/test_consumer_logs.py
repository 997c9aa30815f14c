"""A real trainer with experiment logs: they have what steps.jsonl has, and none of them stops it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.trainers import Begin, Trainers, events, lines
from tests.unit.test_logs import histories, needs


def evaluated(folder: Path) -> list[tuple[int, float]]:
    summary = json.loads((folder / "summary.json").read_text())
    return [(result["step"], result["accuracy"]) for result in summary["evaluations"]]


async def test_both_have_every_step_and_every_evaluation(begin: Begin, trainers: Trainers) -> None:
    needs("tensorboard")
    needs("wandb")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _port, _player, folder = await begin(run={"steps": 4}, logs={"to": ["tensorboard", "wandb"]})
    process = trainers.start()
    stderr = await trainers.end(process)
    assert process.returncode == 0, stderr
    made = lines(folder)
    read = EventAccumulator(str(folder / "tensorboard")).Reload()
    for name in ("reward", "loss", "lag", "trained_tokens_per_s"):
        shown = [(event.step, event.value) for event in read.Scalars(f"train/{name}")]
        assert shown == [(line["step"], pytest.approx(line[name], rel=1e-6)) for line in made]
    told = {event.step: event.value for event in read.Scalars("evaluation/accuracy")}
    assert told == {step: pytest.approx(accuracy) for step, accuracy in evaluated(folder)}
    (file,) = (folder / "wandb").glob("offline-run-*/*.wandb")
    rows = list(histories(file))
    losses = {int(float(row["train/step"])): float(row["train/loss"]) for row in rows if "train/loss" in row}
    assert losses == {line["step"]: pytest.approx(line["loss"]) for line in made}
    assert sum("evaluation/accuracy" in row for row in rows) == len(evaluated(folder))


async def test_one_that_fails_is_said_once_and_stops_nothing(begin: Begin, trainers: Trainers) -> None:
    needs("tensorboard")
    _port, _player, folder = await begin(run={"steps": 4}, logs={"to": ["tensorboard"]})
    (folder / "tensorboard").write_text("a file is in the way")
    process = trainers.start()
    stderr = await trainers.end(process)
    assert process.returncode == 0, stderr
    assert len(lines(folder)) == 4
    assert stderr.count("tensorboard logs nothing more of this run: ") == 1
    assert [event for event in events(folder) if event["event"] == "checkpoint"]
