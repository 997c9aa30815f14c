"""What producers, scorers and the trainer say of their lanes and groups, beside the recorder."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from audit import ledger
from broker.api import Peer
from broker.messages import Task
from consumers.lanes import external_lanes
from consumers.progress import Progress
from headrace.config import Config, EnvironmentConfig
from headrace.telemetry import clock
from headrace.telemetry.journal import Journal
from headrace.telemetry.metrics import Metrics
from headrace.telemetry.phases import Lane
from headrace.version import PolicyVersion
from producers.engines.api import Completion, Request, SamplingParams
from producers.engines.scripted import ScriptedEngine
from producers.gauges import Gauges
from producers.in_play import InPlay
from producers.rewards.pool import Pool
from producers.rewards.worker import Call
from tests.support import make_group, make_task
from weightsync.commits import Commit

FIRST = PolicyVersion(1, 0)


def lines(file: Path, event: str) -> list[dict[str, Any]]:
    return [line for line in map(json.loads, file.read_text().splitlines()) if line["event"] == event]


async def engine_that_sampled(tokens: int) -> ScriptedEngine:
    engine = ScriptedEngine(length_mean=tokens, length_sigma=0, step_s=0.001)
    await engine.start()
    await engine.commit(FIRST)
    await engine.generate(Request("a", np.arange(4, dtype=np.int32), SamplingParams(tokens)))
    return engine


async def test_device_seconds_are_those_of_sampling_by_tokens(tmp_path: Path) -> None:
    engine = await engine_that_sampled(40)
    told = Gauges(engine, Metrics("r", "p1"), Journal(tmp_path / "p1.jsonl"))
    group = make_group(make_task("t"), 1, "p1")
    told.published_group(group, "published", 15, {"taken": 5.0})
    told.lost(25, "u")
    spent = engine.lane.seconds()["decode"]
    (kept,), wasted = lines(tmp_path / "p1.jsonl", "group"), lines(tmp_path / "p1.jsonl", "wasted")
    # Twelve tokens are in its two rollouts.
    assert kept["device_s"] == pytest.approx(12 / 40 * spent, abs=1e-5)
    assert [(line["reason"], line["tokens"], line["task"]) for line in wasted] == [
        ("failed", 3, "t"),
        ("lost", 25, "u"),
    ]
    assert kept["device_s"] + sum(line["device_s"] for line in wasted) == pytest.approx(spent, abs=1e-5)
    assert kept["at"]["taken"] == 5.0
    assert abs(kept["at"]["published"] - clock.now()) < 60
    told.close()
    await engine.close()


async def test_an_engine_with_nothing_to_do_waits_for_what_its_producer_waits_for() -> None:
    engine = await engine_that_sampled(4)
    told = Gauges(engine, Metrics("r", "p1"), None)
    seen = []
    for phase in ("wait_no_task", "wait_behind_on_weights", "wait_scores", "play", "drain"):
        told.does(phase)
        while not engine.lane.phase.startswith("wait_"):  # noqa: ASYNC110 - an engine wakes nobody when it has ended
            await asyncio.sleep(0)
        seen.append((told.host.phase, engine.lane.phase))
    assert seen == [
        ("wait_no_task", "wait_no_task"),
        ("wait_behind_on_weights", "wait_behind_on_weights"),
        ("wait_scores", "wait_scores"),
        ("play", "wait_environment"),
        ("drain", "wait_drain"),
    ]
    await engine.close()


def test_a_swap_is_told_with_its_times(tmp_path: Path) -> None:
    told = Gauges(ScriptedEngine(), Metrics("r", "p1"), Journal(tmp_path / "p1.jsonl"))
    told.committed(Commit(FIRST, 100, 0.2, 0.1, 0.05, 0.6, 1000.0, 1000.1, 1000.5, 1000.75))
    (swap,) = lines(tmp_path / "p1.jsonl", "swap")
    del swap["time"], swap["event"]
    assert swap == {
        "version": "1.0", "nbytes": 100, "sealed": 1000.0, "arrived": 1000.1, "verified": 1000.5,
        "begin": 1000.7, "end": 1000.75, "latency_s": 0.6,
    }  # fmt: skip
    told.close()


def test_a_group_knows_when_it_was_where() -> None:
    begun = clock.now()
    in_play = InPlay(2)
    assert in_play.at.keys() == {"taken"}
    in_play.begin()
    one = Completion("r", np.ones(3, np.int32), np.zeros(3, np.float32), (), "stop", 0.5, 2.0, 0.75)
    in_play.seats[0].transcript.complete(one)
    first = in_play.at["first_token"]
    assert first == pytest.approx(clock.now() - 2.5 + 0.75, abs=0.2)
    in_play.seats[0].transcript.complete(one)
    assert in_play.at["first_token"] == first, "only the first answer has the first token"
    in_play.move(in_play.seats[0], "score")
    assert "decoded" not in in_play.at
    in_play.move(in_play.seats[1], "score")
    in_play.move(in_play.seats[0], "end")
    assert "scored" not in in_play.at
    in_play.move(in_play.seats[1], "end")
    at = in_play.at
    assert begun <= at["taken"] <= at["begun"] <= at["decoded"] <= at["scored"] <= clock.now()
    in_play.move(in_play.seats[1], "end")
    assert in_play.at == at


async def test_a_call_for_a_score_takes_a_lane_while_it_is_under_way() -> None:
    pool = Pool(EnvironmentConfig(name="arithmetic"), workers=2, deadline_s=20.0, memory_mb=4096)
    assert [lane.name for lane in pool.lanes] == ["score/arithmetic/0", "score/arithmetic/1"]
    await pool.start()
    assert [lane.phase for lane in pool.lanes] == ["wait_rollout"] * 2
    # A call that cannot be read is a call all the same.
    asked = asyncio.create_task(pool.call(Call("train", None, True, False, 1, b"no pickle")))
    await asyncio.sleep(0)
    assert sorted(lane.phase for lane in pool.lanes) == ["score", "wait_rollout"]
    await asked
    await asyncio.sleep(0)
    assert [lane.phase for lane in pool.lanes] == ["wait_rollout"] * 2
    await pool.close()
    seconds = [lane.seconds() for lane in pool.lanes]
    assert all(spent["start"] > 0 for spent in seconds)
    assert sum(spent.get("score", 0.0) > 0 for spent in seconds) == 1


def config(*rewards: list[dict[str, Any]]) -> Config:
    return Config.model_validate(
        {"environments": [{"name": f"own{n}.py:Env", "reward": reward} for n, reward in enumerate(rewards)]}
    )


def test_devices_of_reward_models_are_counted_once_each() -> None:
    url = "http://models:8100/score"
    given = config(
        [{"name": url, "devices": 2}, {"name": "http://models:8200/score", "devices": 1}, {"name": "environment"}],
        [{"name": url, "devices": 2}, {"name": "http://models:8300/score"}],
    )
    lanes = {lane.name: (lane.phase, lane.place.device, lane.place.devices) for lane in external_lanes(given)}
    assert lanes == {
        "external/models:8100/score": ("held", "external", 2),
        "external/models:8200/score": ("held", "external", 1),
    }


def test_only_a_service_holds_devices() -> None:
    with pytest.raises(ValidationError, match="devices = 2 is for services, and 'environment' is none; leave it out"):
        config([{"name": "environment", "devices": 2}])


def test_what_a_service_of_another_host_says_of_its_lanes_is_written_here(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    said = Gauges(engine, Metrics("r", "far"), None).heartbeat(0.0, "")
    progress = Progress(tmp_path, Lane("trainer", "start"), Metrics("r", "trainer"), 1, ())
    peer = Peer("far", "producer", "b", 7, True, json.loads(json.dumps(said)))
    strange = Peer("odd", "producer", "b", 8, True, {"lanes": ["engine", {"lane": "x"}, {"lane": "y", "begin": "now"}]})
    progress.elsewhere([peer, strange])
    progress.elsewhere([peer, strange])
    progress.close()
    assert len(lines(tmp_path / "trainer.jsonl", "spans")) == 2, "each lane once, as it has not changed"
    found = {lane.name: lane for lane in ledger.read(tmp_path).lanes}
    assert found.keys() == {"engine", "host"}
    assert (found["engine"].service, found["engine"].host, found["engine"].pid) == ("far", "b", 7)
    sums = {lane["lane"]: lane["sums"] for lane in said["lanes"]}
    assert found["engine"].seconds() == pytest.approx(sums["engine"], abs=1e-6)


def test_tasks_are_told_by_the_step_at_which_they_were_admitted(tmp_path: Path) -> None:
    progress = Progress(tmp_path, Lane("trainer", "start"), Metrics("r", "trainer"), 1, ())
    tasks = [Task(f"t{n}", "train", "sums", n, 1, 4, FIRST, 9, admitted_step=n // 2) for n in range(3)]
    progress.admitted(tasks)
    progress.close()
    told = [(line["step"], line["tasks"]) for line in lines(tmp_path / "trainer.jsonl", "admitted")]
    assert told == [(0, ["t0", "t1"]), (1, ["t2"])]
