"""The quickstart with a tiny model, from its first process to its last, and what it leaves."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.launches import Launches
from tests.support import wait_here

STEPS = 12
SERVICES = {"trainer", "weights", "producer-1"}
LANES = {
    ("trainer", "trainer"),
    ("weights", "verifier"),
    ("weights", "transfer"),
    ("producer-1", "engine"),
    ("producer-1", "host"),
    ("producer-1", "score/arithmetic/0"),
}
METRICS = {
    "trainer": "headrace_trainer_steps_total",
    "weights": "headrace_weights_head_step",
    "producer-1": "headrace_tokens_per_s",
}
PATIENCE_S = 200.0


@dataclass(slots=True)
class Reading:
    """One look at a service's /metrics: seconds per (service, lane), somewhere between two moments."""

    before: float
    after: float
    lanes: dict[tuple[str, str], float]
    text: str


@dataclass(slots=True)
class Seen:
    """A run that has ended, and what was seen of it from outside."""

    run: Path
    code: int
    out: str
    err: str
    summary: dict[str, Any]
    steps: list[int]
    left_processes: list[psutil.Process]
    left_segments: list[str]
    first: dict[str, Reading] = field(default_factory=dict)
    second: dict[str, Reading] = field(default_factory=dict)
    health: dict[str, dict[str, Any]] = field(default_factory=dict)


@pytest.fixture(scope="module")
def seen(module_launches: Launches, tiny_model: Path) -> Seen:
    launches = module_launches
    process = launches.up("--config", "examples/quickstart.toml", "--model", str(tiny_model), "--steps", str(STEPS))
    urls = metrics_urls(launches)
    first = {name: read(url) for name, url in urls.items()}
    wait_here(lambda: len(launches.steps()) >= 2, "two steps are made", PATIENCE_S)
    health = {name: json.loads(get(url.replace("/metrics", "/healthz"))) for name, url in urls.items()}
    second = {name: read(url) for name, url in urls.items()}
    out, err = process.communicate(timeout=PATIENCE_S)
    return Seen(
        run=launches.run,
        code=process.returncode,
        out=out,
        err=err,
        summary=launches.summary(),
        steps=launches.steps(),
        left_processes=launches.processes(),
        left_segments=launches.segments,
        first=first,
        second=second,
        health=health,
    )


def metrics_urls(launches: Launches) -> dict[str, str]:
    """Of each service by name, once all have said theirs."""
    urls: dict[str, str] = {}

    def all_said() -> bool:
        if not all(launches.happened(name, "joined") for name in SERVICES):
            return False
        shown = json.loads(launches.headrace("status", "--json").stdout)
        urls.update({p["name"]: p["state"]["metrics_url"] for p in shown["processes"] if "metrics_url" in p["state"]})
        return set(urls) >= SERVICES

    wait_here(all_said, "every service has said where its metrics are", PATIENCE_S)
    return urls


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=20) as answer:
        assert answer.status == 200
        return str(answer.read().decode())


def read(url: str) -> Reading:
    before = time.perf_counter()
    text = get(url)
    after = time.perf_counter()
    lanes: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "headrace_phase_seconds_total":
                lane = sample.labels["service"], sample.labels["lane"]
                lanes[lane] = lanes.get(lane, 0.0) + sample.value
    return Reading(before, after, lanes, text)


def test_it_ends_well(seen: Seen) -> None:
    assert (seen.err, seen.code) == ("", 0)
    assert f"step {STEPS}/{STEPS}" in seen.out
    assert "held-out accuracy after" in seen.out
    assert seen.steps == list(range(1, STEPS + 1))


def test_the_summary_has_what_the_table_shows(seen: Seen) -> None:
    summary = seen.summary
    assert summary["steps"] == STEPS
    assert summary["wall_s"] > 0
    for accuracy in (summary["accuracy_before"], summary["accuracy_after"]):
        assert 0 <= accuracy <= 1
    assert set(summary["idle_wait"]) == {"trainer", "producers"}
    assert all(0 <= share <= 1 for share in summary["idle_wait"].values())
    assert summary["evaluation_samples"] == 24 * 25


def test_every_task_is_accounted_for(seen: Seen) -> None:
    sheets = seen.summary["balance"]
    assert set(sheets) == {"train", "eval"}
    assert sheets["eval"]["verdicts"] == {"evaluated": 48}
    assert sheets["train"]["verdicts"]["trained"] == 8 * STEPS
    for sheet in sheets.values():
        assert sheet["closed"]
        assert sheet["outstanding"] == 0
        assert sheet["admitted"] == sum(sheet["verdicts"].values())


def test_the_exported_folder_loads(seen: Seen, tiny_model: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    exported = AutoModelForCausalLM.from_pretrained(seen.summary["export"], dtype=torch.float32)
    start = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    moved = [name for name, tensor in exported.named_parameters() if not torch.equal(tensor, start.get_parameter(name))]
    assert moved, "the exported weights are those the run began with"
    tokenizer = AutoTokenizer.from_pretrained(seen.summary["export"])
    shown = tokenizer.apply_chat_template([{"role": "user", "content": "1 + 1"}], tokenize=False)
    assert shown == "<|start|>user\n1 + 1<|end|>\n"


def test_metrics_and_health_answered_while_it_ran(seen: Seen) -> None:
    assert set(seen.health) == SERVICES
    for name, state in seen.health.items():
        assert state["ok"] is True
        assert state["service"] == name
    for name, metric in METRICS.items():
        assert re.search(rf'^{metric}{{.*run="{seen.run.name}"', seen.second[name].text, re.MULTILINE), metric


def test_phases_of_every_lane_sum_to_wall_time(seen: Seen) -> None:
    lanes = {lane for reading in seen.second.values() for lane in reading.lanes}
    assert lanes == LANES
    for name, second in seen.second.items():
        first = seen.first[name]
        for lane, seconds in second.lanes.items():
            grown = seconds - first.lanes[lane]
            assert second.before - first.after - 1e-3 <= grown <= second.after - first.before + 1e-3, lane


def test_nothing_is_left(seen: Seen) -> None:
    assert seen.left_processes == []
    assert seen.left_segments == []
    assert not (seen.run / "connection.json").exists()


def test_the_example_of_ones_own_environment_runs(launched: Launches, tiny_model: Path) -> None:
    example = "examples/own_environment.toml"
    done = launched.headrace("up", "--config", example, "--model", str(tiny_model), "--steps", "2")
    assert (done.stderr, done.returncode) == ("", 0)
    assert launched.steps() == [1, 2]
    sheets = launched.summary()["balance"]
    assert sheets["eval"]["verdicts"] == {"evaluated": 48}
    assert sheets["train"]["closed"]
    shown = [example["prompt"] for example in launched.summary()["examples"]]
    assert any("Say these two words in the other order" in prompt for prompt in shown)
    assert launched.processes() == []
    assert launched.segments == []
