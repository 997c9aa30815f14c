"""Runs for `benchmarks.overlap`: one of the launcher's, whole; and its two stages, each in a run of its own, uncoupled.

Uncoupled, the producer plays tasks of one run, of which there are always enough and whose groups are settled as they
come; the trainer of the other run is given those groups, again and again, as soon as it asks for any. Both work at the
same time, each on its core, so that they share what they share in a whole run: memory bandwidth.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path

from audit.figures import Figures, figures
from audit.reading import read
from benchmarks.overlap_parts import STEP_S
from broker.api import Fence, Hello, RunRecord
from broker.connect import Run, connect_run, connect_runs
from broker.messages import SCHEMA, Group, StepEntry, Task, Trajectory
from deploy.inspection import Facts, inspect
from deploy.plan import localized
from deploy.processes import Child, Command
from deploy.redis_server import RedisServer
from headrace.config import Config
from headrace.config_sources import resolve
from headrace.policy.loading import layout_of, load_model
from headrace.policy.prepare import resolve_model
from headrace.version import PolicyVersion
from weightsync.arena import Arena
from weightsync.manifest import Layout
from weightsync.publisher import Publisher

WARM_UP = 2
"""Steps that are not counted: of caches, of the queue before the trainer."""
FAR_MS = 86_400_000
RUNS = "generate", "train"


@dataclass(frozen=True, slots=True)
class Whole:
    """What one run consumed, once it was under way."""

    samples_per_s: float
    samples_per_device_hour: float
    figures: Figures
    wait_s: float
    """Seconds of a step in which the trainer waited for its groups."""


def whole(folder: Path, name: str, toml: str, step_s: float = 0.0) -> Whole:
    """The run of this configuration, by `headrace up`. Raises RuntimeError when it fails."""
    file = folder / f"{name}.toml"
    file.write_text(toml)
    ended = subprocess.run(
        [sys.executable, "-m", "deploy.cli", "up", "--config", str(file), "--run", name],
        env={**os.environ, "HEADRACE__RUN__FOLDER": str(folder / "runs"), STEP_S: str(step_s)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if ended.returncode:
        raise RuntimeError(f"run {name} ended with {ended.returncode}: {ended.stderr[-2000:]}")
    run = read(folder / "runs" / name)
    steady = replace(run, steps=run.steps[WARM_UP:])
    counted, seconds = run.steps[WARM_UP:], run.steps[-1].end - run.steps[WARM_UP - 1].end
    rate = sum(step.rollouts for step in counted) / seconds
    waited = figures(steady).idle_by_reason.get("training", {}).get("groups", 0.0)
    devices = 2 if run.config["run"]["placement"] == "disaggregated" else 1
    return Whole(rate, rate * 3600 / devices, figures(steady), waited * seconds / len(counted))


@dataclass(frozen=True, slots=True)
class Stages:
    """Samples per second of each stage by itself, beside the other."""

    generated: float
    trained: float

    @property
    def slower(self) -> float:
        return min(self.generated, self.trained)


def stages(folder: Path, name: str, toml: str, steps: int, step_s: float = 0.0) -> Stages:
    """Both stages of this configuration, over so many steps of the trainer."""
    (folder / f"{name}.toml").write_text(toml)
    config = localized(resolve(folder / f"{name}.toml", {}, ()).config)
    server = RedisServer(folder / name / "redis", folder / name / "redis.log")
    (folder / name).mkdir()
    server.start()
    try:
        return asyncio.run(_Uncoupled(server.url, folder / name, config).measure(steps, step_s))
    finally:
        server.stop()


class _Uncoupled:
    """Two runs on one Redis: of one this process is the trainer, of the other the producer."""

    def __init__(self, url: str, folder: Path, config: Config) -> None:
        self._url, self._folder = url, folder
        # Neither ends by itself.
        endless = {"steps": 1_000_000}
        self._config = config.model_copy(update={"run": config.run.model_copy(update=endless)})
        self._size = config.trainer.group_size
        self._model = resolve_model(config.model.path)
        self._environment = config.environments[0].called
        self._made: list[float] = []
        """When each group came."""
        self._newest: deque[Group] = deque(maxlen=4 * config.trainer.groups_per_step)
        self._there = asyncio.Event()
        self._over = asyncio.Event()
        self._children: list[Child] = []

    async def measure(self, steps: int, step_s: float) -> Stages:
        facts = inspect(self._config)
        ports = [await self._begin(name, facts) for name in RUNS]
        cores = sorted(os.sched_getaffinity(0))
        self._start("train", "trainer", "consumers", cores[0], step_s)
        self._start("generate", "producer-1", "producers", cores[1])
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._consume(ports[0]))
                group.create_task(self._produce(ports[1]))
                begin, end = await self._steps(WARM_UP), await self._steps(WARM_UP + steps)
                self._over.set()
        finally:
            self._over.set()
            for child in self._children:
                child.kill()
                await child.exited()
                child.close()
            for run_id, port in zip(RUNS, ports, strict=True):
                await port.close()
                Arena(run_folder=self._folder / run_id).sweep(run_id)
        made = sum(begin < at <= end for at in self._made)
        trained = steps * self._config.trainer.groups_per_step
        return Stages(made * self._size / (end - begin), trained * self._size / (end - begin))

    async def _begin(self, run_id: str, facts: Facts) -> Run:
        folder = self._folder / run_id
        folder.mkdir()
        tree = self._config.model_dump(mode="json")
        record = RunRecord(
            run_id, SCHEMA, tree, facts.digests, facts.vocab_size, 0, str(folder), facts.dataset_sizes
        )  # fmt: skip
        runs = connect_runs(self._url)
        await runs.create(record)
        await runs.close()
        port = connect_run(self._url, run_id)
        await port.record()
        return port

    def _start(self, run_id: str, name: str, module: str, core: int, step_s: float = 0.0) -> None:
        told = {"HEADRACE_REDIS_URL": self._url, "HEADRACE_RUN": run_id, "HEADRACE_NAME": name, STEP_S: str(step_s)}
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        command = Command(
            (sys.executable, "-m", module), {**told, **threads}, self._folder / f"{name}.log", frozenset({core})
        )
        self._children.append(Child.spawn(command))

    async def _steps(self, count: int) -> float:
        """When the trainer has made so many. Raises RuntimeError when a service has ended."""
        file = self._folder / "train" / "steps.jsonl"
        while not (file.exists() and len(lines := file.read_text().splitlines()) >= count):
            if any(child.code is not None for child in self._children):
                raise RuntimeError(f"a service has ended; see {self._folder}")
            # Whoever writes it wakes nobody.
            await asyncio.sleep(0.05)
        return float(json.loads(lines[count - 1])["time"])

    async def _consume(self, port: Run) -> None:
        """Keeps as many tasks open as a trainer with `max_lag` 4 does, and keeps the groups that come."""
        fence = await port.take_fence(0)
        publisher = await self._publish(port, fence)
        numbers = itertools.count()
        open_tasks, window = 0, 5 * self._config.trainer.groups_per_step
        while not self._over.is_set():
            deadline_ms = await port.now_ms() + FAR_MS
            wanted = [next(numbers) for _ in range(window - open_tasks)]
            await port.admit(fence, [self._task(fence, number, deadline_ms) for number in wanted])
            came = await port.take_groups(fence, 32, 500)
            open_tasks = window - len(came)
            self._made += [time.time()] * len(came)
            self._newest += [delivery.group for delivery in came if delivery.group.outcome == "played"]
            await port.settle(fence, [StepEntry(one.entry_id, one.group.task_id, "trained") for one in came])
            if len(self._newest) == self._newest.maxlen:
                self._there.set()
        await publisher.close()

    def _task(self, fence: Fence, number: int, deadline_ms: int) -> Task:
        oldest = PolicyVersion(fence.incarnation, 0)
        return Task(f"t{number}", "train", self._environment, number, number, self._size, oldest, deadline_ms)

    async def _publish(self, port: Run, fence: Fence) -> Publisher:
        model = await asyncio.to_thread(load_model, self._model, "float32")
        layout = Layout.of(layout_of(model, self._config.model.wire_dtype))
        arena = Arena(run_folder=(await port.record()).folder)
        publisher = Publisher(port, fence, layout, "generate", 2, arena=arena)
        await publisher.publish(PolicyVersion(fence.incarnation, 0), dict(model.named_parameters()))
        await publisher.sealed()
        return publisher

    async def _produce(self, port: Run) -> None:
        """Answers each task of the trainer with what the real producer has made, as soon as there is enough of it."""
        record = await port.record()
        await port.join(Hello("relay", SCHEMA, record.digests, "localhost", os.getpid()))
        while not self._over.is_set():
            head = await port.wait_head(None, 500)
            if head is None or not self._there.is_set():
                await asyncio.sleep(0.05)
                continue
            for delivery in await port.take("relay", 4, 500):
                self._newest.rotate(1)
                group, task = self._newest[0], delivery.task
                renamed = replace(
                    group, task_id=task.task_id, attempt=delivery.attempt, index=task.index, producer="relay",
                    trajectories=tuple(_of_version(one, max(head, task.min_version)) for one in group.trajectories),
                )  # fmt: skip
                await port.publish("relay", delivery, renamed)


def _of_version(trajectory: Trajectory, version: PolicyVersion) -> Trajectory:
    return replace(trajectory, spans=tuple(span._replace(version=version) for span in trajectory.spans))
