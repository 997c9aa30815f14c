"""A real trainer process against a real Redis and a producer that answers its tasks with random tokens."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from broker.api import Hello, RunRecord
from broker.connect import Run, connect_run, connect_runs
from broker.messages import SCHEMA, Group, TaskDelivery, Trajectory, VersionSpan
from headrace.config import BrokerConfig, Config
from headrace.errors import CheckpointError, Fenced, Refused, ServiceError, WeightError
from headrace.policy.loading import model_digests
from headrace.version import PolicyVersion
from tests.support import wait_until as wait_until_within
from tests.tiny import VOCABULARY

PATIENCE_S = 100.0
"""A trainer imports torch and transformers first, on a machine that other tests share."""
pytestmark = pytest.mark.timeout(240)
BROKER = BrokerConfig(stream_block_ms=200, connect_timeout_s=5.0)


def config(tiny_model: Path, **sections: dict[str, Any]) -> Config:
    tree: dict[str, Any] = {
        "run": {"steps": 6},
        "model": {"path": str(tiny_model)},
        "sampling": {"max_new_tokens": 8},
        "trainer": {"groups_per_step": 2, "group_size": 3, "autocast": "off", "learning_rate": 1e-3},
        "staleness": {"max_lag": 2},
        "producer": {"slots": 8},
        "checkpoint": {"every": 2},
        "evaluation": {"prompts": 3, "samples_per_prompt": 4},
        "broker": BROKER.model_dump(),
    }
    for name, values in sections.items():
        tree[name] = {**tree[name], **values}
    return Config.model_validate(tree)


class Player:
    """Answers tasks as a producer would: on the newest version, once that is new enough. Tokens depend on the task."""

    def __init__(self, port: Run) -> None:
        self.port = port
        self.answered: list[TaskDelivery] = []
        self.failing = False
        self.paused = False
        self.ended = asyncio.Event()

    async def play(self) -> None:
        while not self.ended.is_set():
            if self.paused:
                await asyncio.sleep(0.01)
                continue
            for delivery in await self.port.take("player", 2, 100):
                await self._answer(delivery)

    async def _answer(self, delivery: TaskDelivery) -> None:
        version: PolicyVersion | None = None
        while version is None or version < delivery.task.min_version:
            if self.ended.is_set():
                return
            version = await self.port.wait_head(version, 100)
        group = self.group(delivery, version)
        assert await self.port.publish("player", delivery, group) == "published"
        self.answered.append(delivery)

    def group(self, delivery: TaskDelivery, version: PolicyVersion) -> Group:
        task = delivery.task
        common = {
            "task_id": task.task_id,
            "attempt": delivery.attempt,
            "kind": task.kind,
            "environment": task.environment,
            "index": task.index,
            "producer": "player",
        }
        if self.failing:
            return Group(**common, trajectories=(), outcome="failed", error="reward raised ValueError: no")
        members = tuple(
            self._trajectory(np.random.default_rng([task.seed, i]), version) for i in range(task.group_size)
        )
        return Group(**common, trajectories=members)

    def _trajectory(self, rng: np.random.Generator, version: PolicyVersion) -> Trajectory:
        tokens = rng.integers(0, 64, 10).astype(np.int32)
        tokens[:4] = 7
        mask = np.arange(10) >= 4
        logprobs = np.where(mask, -5.55, 0).astype(np.float32)
        reward = float(tokens[-1] % 2)
        return Trajectory(tokens, logprobs, mask, (VersionSpan(4, 10, version),), reward, "stop")


class Trainers:
    """Starts trainer processes of one run; all are gone at the end."""

    def __init__(self, url: str, run_id: str) -> None:
        self.environment = {**os.environ, "HEADRACE_REDIS_URL": url, "HEADRACE_RUN": run_id, "OMP_NUM_THREADS": "1"}
        self.started: list[subprocess.Popen[str]] = []

    def start(self, *options: str, **more: Any) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "consumers", *options]
        self.started.append(subprocess.Popen(command, env=self.environment, stderr=subprocess.PIPE, text=True, **more))
        return self.started[-1]

    async def end(self, process: subprocess.Popen[str], seconds: float = PATIENCE_S) -> str:
        """Wait for its end; returns what it wrote to stderr."""
        return (await asyncio.to_thread(process.communicate, timeout=seconds))[1]


@pytest.fixture
def trainers(redis_url: str, run_id: str) -> Iterator[Trainers]:
    made = Trainers(redis_url, run_id)
    yield made
    for process in made.started:
        if process.poll() is None:
            process.kill()
        process.wait(20)
        assert process.stderr is not None
        process.stderr.close()


async def wait_until(predicate: Callable[[], bool], what: str) -> None:
    await wait_until_within(predicate, what, PATIENCE_S)


Begin = Callable[..., Any]


@pytest.fixture
async def begin(
    redis_url: str, run_id: str, tiny_model: Path, tmp_path: Path, no_key_left: None
) -> AsyncIterator[Begin]:
    """Creates the run and a player: `port, player, folder = await begin(trainer={…})`."""
    runs = connect_runs(redis_url, BROKER)
    ports: list[Run] = []
    players: list[tuple[Player, asyncio.Task[None]]] = []

    async def make(**sections: dict[str, Any]) -> tuple[Run, Player, Path]:
        record = RunRecord(
            run_id,
            SCHEMA,
            config(tiny_model, **sections).model_dump(mode="json"),
            model_digests(tiny_model),
            VOCABULARY,
            int(time.time() * 1000),
            str(tmp_path / "run"),
            {"train/arithmetic": 50, "eval/arithmetic": 5},
        )
        (tmp_path / "run").mkdir()
        await runs.create(record)
        ports.extend(connect_run(redis_url, run_id, BROKER) for _ in range(2))
        player = Player(ports[1])
        await player.port.join(Hello("player", SCHEMA, record.digests, "here", os.getpid()))
        players.append((player, asyncio.create_task(player.play())))
        return ports[0], player, tmp_path / "run"

    yield make
    for player, task in players:
        player.ended.set()
        await task
    for port in ports:
        await port.close()
    await runs.delete(run_id)
    await runs.close()


def lines(folder: Path) -> list[dict[str, Any]]:
    file = folder / "steps.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "trainer.jsonl").read_text().splitlines()]


async def test_a_run_from_its_first_version_to_its_summary(begin: Begin, trainers: Trainers) -> None:
    port, _player, folder = await begin()
    process = trainers.start()
    stderr = await trainers.end(process)
    assert process.returncode == 0, stderr

    made = lines(folder)
    assert [line["step"] for line in made] == [1, 2, 3, 4, 5, 6]
    assert all(line["lag"] <= 2 and line["skipped"] == "" and line["rollouts"] == 6 for line in made)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 6
    assert summary["accuracy_before"] == summary["accuracy_after"], "both evaluations ask the same of this producer"
    assert summary["evaluation_samples"] == 12
    assert summary["balance"]["train"]["verdicts"] == {"trained": 12}
    assert summary["balance"]["eval"]["verdicts"] == {"evaluated": 6}
    assert all(sheet["closed"] and sheet["outstanding"] == 0 for sheet in summary["balance"].values())
    assert summary["examples"][0]["prompt"] == "(((("
    assert 0 <= summary["idle_wait"]["trainer"] <= 1
    assert sum(summary["seconds"]["trainer"].values()) <= summary["wall_s"]

    exported = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert exported.num_parameters() > 0
    assert (folder / "model" / "tokenizer.json").exists()
    assert [p.name for p in sorted((folder / "checkpoints" / "1").iterdir())] == ["00000004", "00000006"]
    state = await port.state()
    assert (state.status, state.step) == ("finished", 6)
    assert not [peer for peer in await port.peers() if peer.role == "trainer"]


async def test_a_killed_trainer_goes_on_to_the_same_weights(
    begin: Begin, trainers: Trainers, tmp_path: Path, redis_url: str
) -> None:
    """Killed between two checkpoints: the steps after the last one are made again from the log, no rollout is lost."""
    port, _, folder = await begin(run={"steps": 9}, checkpoint={"every": 4}, evaluation={"prompts": 0})
    first = trainers.start()
    await wait_until(lambda: len(lines(folder)) >= 6, "six steps are made")
    first.send_signal(signal.SIGKILL)
    first.wait(20)
    before = {record.version.step: record for record in await port.steps_after(4)}
    second = trainers.start("--resume")
    stderr = await trainers.end(second)
    assert second.returncode == 0, stderr

    replayed = {event["step"]: event["loss"] for event in events(folder) if event["event"] == "replayed"}
    assert set(replayed) == set(before)
    losses = {
        line["step"]: line["loss"] for line in lines(folder) if line["step"] in replayed and line["version"][0] == "1"
    }
    assert losses == {step: pytest.approx(replayed[step], abs=1e-6) for step in losses}
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 9
    assert summary["balance"]["train"]["verdicts"] == {"trained": 18}
    assert summary["balance"]["train"]["closed"]
    assert summary["balance"]["train"]["outstanding"] == 0


async def test_without_lag_every_group_is_sampled_from_the_newest_version(begin: Begin, trainers: Trainers) -> None:
    sections = {"run": {"steps": 4}, "staleness": {"max_lag": 0}, "evaluation": {"prompts": 0}}
    _port, player, folder = await begin(**sections)
    process = trainers.start()
    stderr = await trainers.end(process)
    assert process.returncode == 0, stderr
    assert [line["lag"] for line in lines(folder)] == [0, 0, 0, 0]
    assert [delivery.task.min_version.step for delivery in player.answered] == [0, 0, 1, 1, 2, 2, 3, 3]


async def test_a_run_that_was_trained_before_needs_resume(begin: Begin, trainers: Trainers) -> None:
    await begin(run={"steps": 1}, evaluation={"prompts": 0})
    await trainers.end(trainers.start())
    again = trainers.start()
    assert "has been trained before; --resume goes on with it" in await trainers.end(again)
    assert again.returncode == ServiceError.exit_code


async def test_a_finished_run_goes_on_with_more_steps(begin: Begin, trainers: Trainers, redis_url: str) -> None:
    port, _player, folder = await begin(run={"steps": 2})
    stderr = await trainers.end(trainers.start())
    before = json.loads((folder / "summary.json").read_text())
    assert before["steps"] == 2, stderr
    record, runs = await port.record(), connect_runs(redis_url, BROKER)
    await runs.amend(replace(record, config={**record.config, "run": {**record.config["run"], "steps": 4}}))
    await runs.close()
    stderr = await trainers.end(trainers.start("--resume"))
    assert [(line["step"], line["version"]) for line in lines(folder)] == [
        (1, "1.1"),
        (2, "1.2"),
        (3, "2.3"),
        (4, "2.4"),
    ], stderr
    after = json.loads((folder / "summary.json").read_text())
    assert (after["steps"], after["accuracy_before"]) == (4, before["accuracy_before"])
    assert after["balance"]["train"]["verdicts"] == {"trained": 8}
    assert after["balance"]["train"]["outstanding"] == 0
    assert (await port.state()).status == "finished"


async def test_told_to_leave_it_writes_a_checkpoint_and_the_run_goes_on_later(begin: Begin, trainers: Trainers) -> None:
    port, _player, folder = await begin(run={"steps": 40}, checkpoint={"every": 30}, evaluation={"prompts": 0})
    first = trainers.start()
    await wait_until(lambda: len(lines(folder)) >= 3, "three steps are made")
    first.send_signal(signal.SIGTERM)
    stderr = await trainers.end(first)
    assert first.returncode == 0, stderr
    step = len(lines(folder))
    assert (folder / "checkpoints" / "1" / f"{step:08d}" / "state.json").exists()
    second = trainers.start("--resume")
    await wait_until(lambda: len(lines(folder)) > step, "a step after the resume")
    assert lines(folder)[step]["version"] == f"2.{step + 1}"
    second.send_signal(signal.SIGTERM)
    await trainers.end(second)
    sheet = next(sheet for sheet in await port.balance() if sheet.kind == "train")
    assert sheet.closed


async def test_failed_groups_do_not_stop_the_run_until_nothing_else_comes(begin: Begin, trainers: Trainers) -> None:
    port, player, folder = await begin(evaluation={"prompts": 0})
    player.failing = True
    process = trainers.start()
    await wait_until(lambda: len(player.answered) >= 8, "more failures than there are slots")
    player.failing = False
    await wait_until(lambda: len(lines(folder)) >= 1, "a step from the groups that did not fail")
    player.failing = True
    stderr = await trainers.end(process)
    assert process.returncode == ServiceError.exit_code
    assert "groups all failed; the newest: reward raised ValueError: no" in stderr
    sheet = next(sheet for sheet in await port.balance() if sheet.kind == "train")
    assert sheet.closed
    assert sheet.reasons["failed: reward raised ValueError: no"] == sheet.verdicts["failed"]


async def test_a_checkpoint_without_room_is_tried_again_and_the_last_one_is_a_sentence(
    begin: Begin, trainers: Trainers
) -> None:
    """A file in the place of the folder stands in for a full disk."""
    port, _player, folder = await begin(checkpoint={"every": 1}, evaluation={"prompts": 0})
    (folder / "checkpoints").write_text("")
    process = trainers.start()
    stderr = await trainers.end(process)
    assert process.returncode == CheckpointError.exit_code
    assert f"-{process.pid}: checkpoint " in stderr
    assert "cannot be written: " in stderr
    failed = [event["step"] for event in events(folder) if event["event"] == "checkpoint_failed"]
    assert failed == [1, 2, 3, 4, 5, 6]
    sheet = next(sheet for sheet in await port.balance() if sheet.kind == "train")
    assert sheet.outstanding == 12, "what no checkpoint contains stays in the broker"


@pytest.mark.parametrize("gone", ["room", "folder"])
async def test_a_version_without_memory_ends_the_trainer_with_a_sentence(
    gone: str, begin: Begin, trainers: Trainers, tmp_path: Path
) -> None:
    """Also while its intake waits for groups, and may lose its cancellation."""
    _port, player, folder = await begin(
        run={"steps": 1000}, evaluation={"prompts": 0}, checkpoint={"every": 1000}, trainer={"group_size": 2}
    )
    (tmp_path / "memory").mkdir()
    trainers.environment["HEADRACE_SHM_DIR"] = str(tmp_path / "memory")
    process = trainers.start()
    await wait_until(lambda: len(lines(folder)) >= 2, "two steps are made")
    player.paused = True
    if gone == "room":
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (100_000, 100_000))
    else:
        shutil.rmtree(tmp_path / "memory")
    player.paused = False
    stderr = await trainers.end(process)
    assert process.returncode == WeightError.exit_code
    assert "Traceback" not in stderr
    assert f"weight segment{'' if gone == 'room' else 's'}" in stderr.splitlines()[-1]


async def test_a_fenced_trainer_ends_with_a_sentence(begin: Begin, trainers: Trainers) -> None:
    port, _player, folder = await begin(run={"steps": 1000}, evaluation={"prompts": 0})
    first = trainers.start()
    await wait_until(lambda: len(lines(folder)) >= 1, "a step is made")
    await port.take_fence(1)
    stderr = await trainers.end(first)
    assert first.returncode == Fenced.exit_code
    assert "belongs to the trainer of incarnation" in stderr


async def test_a_run_that_is_not_there_is_a_sentence(begin: Begin, trainers: Trainers) -> None:
    await begin()
    process = trainers.start("--run", "no-such-run")
    assert "no run 'no-such-run'" in await trainers.end(process)
    assert process.returncode == Refused.exit_code
