"""Engine and trainer compute the same policy, or it is said once that they do not, or that nobody can tell."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from consumers.agreement import LEAST_TOKENS, PATIENCE, Agreement
from consumers.drift import Drift
from consumers.progress import Progress
from consumers.troubles import Troubles
from headrace.config import Config
from headrace.telemetry.metrics import Metrics
from headrace.telemetry.phases import Lane


class Scene:
    def __init__(self, folder: Path, **config: Any) -> None:
        self.metrics, self.troubles, self.folder = Metrics("r", "trainer"), Troubles(), folder
        self.progress = Progress(folder, Lane("trainer", "load"), self.metrics, 1, ())
        self.agreement = Agreement(Config.model_validate(config), self.progress, self.troubles)

    def judge(self, kl: float | None, tokens: int = 1000, steps: int = 1) -> list[str]:
        for step in range(steps):
            self.agreement.judge(step, Drift(engine_kl=kl, engine_tokens=tokens if kl is not None else 0))
        return [trouble["reason"] for trouble in self.troubles.shown()]

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "trainer.jsonl").read_text().splitlines()]


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path)
    yield made
    made.progress.close()


def test_a_disagreement_is_said_once_and_ends_when_it_is_over(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    assert scene.judge(0.019) == []
    (said,) = scene.judge(0.31)
    assert "engines and trainer disagree about the policy: at step 0, over 1000 tokens" in said
    assert "is 0.31 nats per token, above trainer.engine_kl_bound = 0.02" in said
    assert scene.judge(0.4, steps=3) == [said], "the first sentence stays"
    assert scene.judge(None, steps=3) == [said], "no news is no agreement"
    assert [record.levelno for record in caplog.records if "disagree" in record.message] == [logging.ERROR]
    assert 'headrace_trainer_engine_disagrees{run="r",service="trainer"} 1.0' in scene.metrics.render().decode()
    assert scene.judge(0.01) == []
    assert 'headrace_trainer_engine_disagrees{run="r",service="trainer"} 0.0' in scene.metrics.render().decode()
    assert [event["event"] for event in scene.events()] == ["disagreement"]
    assert 'trainer_events_total{kind="disagreement",run="r",service="trainer"} 1.0' in scene.metrics.render().decode()


def test_a_few_tokens_are_gathered_before_they_are_judged(scene: Scene) -> None:
    few = LEAST_TOKENS // 4
    assert scene.judge(9.0, few, steps=3) == []
    assert len(scene.judge(0.0, few)) == 1, "three of four tokens were far off"
    assert len(scene.judge(0.0, few, steps=3)) == 1
    assert scene.judge(0.0, few) == [], "the next four quarters were not"


def test_that_nothing_can_be_told_is_said_once(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    scene.judge(None, steps=PATIENCE - 1)
    scene.judge(0.0)
    scene.judge(None, steps=PATIENCE + 9)
    (event,) = scene.events()
    assert event["event"] == "agreement_unknown"
    assert "no token of them was sampled by the version that it was trained on" in event["reason"]
    assert scene.troubles.shown() == []
    assert len([record for record in caplog.records if "cannot be told" in record.message]) == 1


def test_why_nothing_can_be_told_is_said(tmp_path: Path) -> None:
    scene = Scene(tmp_path, sampling={"top_p": 0.9})
    scene.judge(None, steps=PATIENCE)
    scene.progress.close()
    assert "top_p or top_k cut the distributions" in scene.events()[0]["reason"]
