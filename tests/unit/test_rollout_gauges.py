"""What a producer counts: groups by what became of them, tokens that nobody trains on, outages, a full disk."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from broker.messages import Group
from headrace.errors import ServiceError
from headrace.telemetry.journal import Journal
from headrace.telemetry.metrics import Metrics
from headrace.version import PolicyVersion
from producers.engines.api import Request, SamplingParams
from producers.engines.scripted import ScriptedEngine
from producers.gauges import Gauges, wasted
from producers.rewards.worker import Score
from tests.support import make_group, make_task

GROUP = make_group(make_task("t"), 1, "p1")
"""Two rollouts of six sampled tokens each."""
STALE = replace(GROUP, trajectories=(), outcome="stale", error="too old", stopped_N=(5, 2))
FAILED = replace(GROUP, trajectories=(), outcome="failed", error="no", failures=("no", "no"))


class FullDisk(Journal):
    full = True

    def write(self, event: str, **fields: object) -> None:
        if self.full:
            raise ServiceError("journal p1.jsonl cannot be written: No space left on device")
        super().write(event, **fields)


def gauges(journal: Journal | None = None) -> tuple[Gauges, Metrics]:
    metrics = Metrics("r", "p1")
    return Gauges(ScriptedEngine(), metrics, journal), metrics


def counts(metrics: Metrics, name: str) -> dict[str, float]:
    """What a metric says, by its labels other than run and service."""
    found = {}
    for line in metrics.render().decode().splitlines():
        if line.startswith(f"headrace_{name}{{"):
            labels = dict(re.findall(r'(\w+)="([^"]*)"', line))
            found[" ".join(labels[label] for label in sorted(labels.keys() - {"run", "service"}))] = float(
                line.split()[-1]
            )
    return found


def test_the_parts_of_a_reward_are_seen_by_themselves() -> None:
    told, metrics = gauges()
    told.scored("sums", Score(0.95, parts={"math_verify": 1.0, "mine.py:brief": 0.5}))
    told.scored("sums", Score(1.0, parts={"math_verify": 1.0, "mine.py:brief": 1.0}))
    told.scored("sums", Score(1.0))
    told.scored("sums", Score(failure="reward took too long"))
    buckets = counts(metrics, "reward_part_bucket")
    assert {labels: count for labels, count in buckets.items() if labels.split()[1] in ("0.5", "+Inf")} == {
        "sums 0.5 math_verify": 0.0,
        "sums +Inf math_verify": 2.0,
        "sums 0.5 mine.py:brief": 1.0,
        "sums +Inf mine.py:brief": 2.0,
    }


def test_tokens_are_thrown_away_for_a_reason() -> None:
    told, metrics = gauges()
    told.published_group(GROUP, "published", 12, {})
    assert counts(metrics, "tokens_thrown_away_total") == {"failed": 0.0}
    told.published_group(replace(GROUP, failures=("no",)), "repeated", 15, {})
    told.published_group(FAILED, "published", 4, {})
    told.published_group(GROUP, "superseded", 13, {})
    told.published_group(STALE, "superseded", 7, {})
    told.published_group(STALE, "published", 7, {})
    told.lost(30, "t")
    assert counts(metrics, "tokens_thrown_away_total") == {
        "failed": 7.0,
        "superseded": 20.0,
        "stale": 7.0,
        "lost": 30.0,
    }
    assert counts(metrics, "groups_total") == {
        "train published": 1.0,
        "train repeated": 1.0,
        "train failed": 1.0,
        "train superseded": 2.0,
        "train stale": 1.0,
    }
    assert counts(metrics, "rollouts_stopped_total") == {"": 4.0}


@pytest.mark.parametrize(("group", "expected"), [(GROUP, 8), (STALE, 20), (FAILED, 20)])
def test_what_is_in_no_trajectory_is_wasted(group: Group, expected: int) -> None:
    assert wasted(group, "published", 20) == expected
    assert wasted(group, "superseded", 20) == 20
    assert np.sum(GROUP.trajectories[0].loss_mask_T) == 6


async def test_tokens_of_the_engine_are_told_by_how_they_were_computed() -> None:
    engine, metrics = ScriptedEngine(length_sigma=0, length_mean=40, kv="recompute"), Metrics("r", "p1")
    told = Gauges(engine, metrics, None)
    names = ("decoded_tokens", "prefill_tokens", "recomputed_tokens")
    assert [told.heartbeat(0.0, "")[name] for name in names] == [0, 0, 0]
    await engine.start()
    await engine.commit(PolicyVersion(1, 0))
    done = asyncio.create_task(engine.generate(Request("a", np.arange(9, dtype=np.int32), SamplingParams(40))))
    while engine.stats().decoded_tokens < 3:  # noqa: ASYNC110 - an engine wakes nobody between two tokens
        await asyncio.sleep(0)
    await engine.commit(PolicyVersion(1, 1))
    told.heartbeat(0.0, "")
    swapped = (await done).spans[1].start
    said = told.heartbeat(0.0, "")
    assert [said[name] for name in names] == [40, 9, 9 + swapped - 1]
    assert [counts(metrics, f"{name}_total")[""] for name in names] == [said[name] for name in names]
    await engine.close()


def test_a_heartbeat_says_how_late_the_event_loop_is() -> None:
    told = Gauges(ScriptedEngine(), Metrics("r", "p1"), None)
    assert told.heartbeat(0.75, "")["event_loop_lag_s"] == 0.75


def test_an_outage_is_told_once_and_counted(tmp_path: Path) -> None:
    told, metrics = gauges(Journal(tmp_path / "p1.jsonl"))
    told.outage("Redis is full")
    told.outage("Redis is full, still")
    assert counts(metrics, "outage") == {"": 1.0}
    told.outage("")
    told.outage("")
    assert counts(metrics, "outage") == {"": 0.0}
    assert counts(metrics, "outage_seconds_total")[""] > 0
    journal = (tmp_path / "p1.jsonl").read_text()
    assert journal.count('"event": "outage", "why": "Redis is full"}') == 1
    assert journal.count('"event": "outage_over"') == 1
    told.close()


def test_a_full_disk_ends_no_rollout(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal = FullDisk(tmp_path / "p1.jsonl")
    told, metrics = gauges(journal)
    told.event("one")
    told.published_group(GROUP, "published", 12, {})
    assert counts(metrics, "journal_lines_lost_total") == {"": 2.0}
    assert caplog.text.count("No space left on device; rollouts go on without it") == 1
    (trouble,) = told.heartbeat(0.0, "")["troubles"]
    assert trouble["reason"].endswith("rollouts go on without it")
    journal.full = False
    told.event("three")
    assert told.heartbeat(0.0, "")["troubles"] == []
    assert '"event": "three"' in (tmp_path / "p1.jsonl").read_text()
    told.close()


def test_a_heartbeat_says_why_the_producer_waits() -> None:
    told, _ = gauges()
    assert told.heartbeat(0.0, "")["troubles"] == []
    told.outage("Redis is full")
    (first,) = told.heartbeat(0.0, "")["troubles"]
    told.outage("Redis cannot be reached")
    (second,) = told.heartbeat(0.0, "")["troubles"]
    assert [first["reason"], second["reason"]] == ["Redis is full", "Redis cannot be reached"]
    assert first["since"] == second["since"], "it has waited since the first reason"
    told.outage("")
    assert told.heartbeat(0.0, "")["troubles"] == []
