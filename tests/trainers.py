"""What the tests of whole trainers share: the other side of one, and a run with what is started in it."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from broker.connect import Run
from broker.messages import Group, TaskDelivery, Trajectory, VersionSpan
from headrace.config import BrokerConfig, Config
from headrace.version import PolicyVersion
from tests.support import wait_until as wait_until_within
from tests.warm import WarmProcess

PATIENCE_S = 100.0
"""A trainer imports torch and transformers first, on a machine that other tests share."""
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
        tree[name] = {**tree.get(name, {}), **values}
    return Config.model_validate(tree)


Begin = Callable[..., Any]


class Player:
    """Answers tasks as a producer would: on the newest version, once that is new enough. Tokens depend on the task."""

    def __init__(self, port: Run) -> None:
        self.port = port
        self.answered: list[TaskDelivery] = []
        self.failing = False
        self.completion = 6
        """Tokens that each rollout samples."""
        self.reward: float | None = None
        """Of every rollout; then none has an advantage, and steps cost nothing. None depends on the tokens."""
        self.paused = False
        self.most = sys.maxsize
        """Tasks that it answers; the next one after them it does not even take."""
        self.mixes = 0
        """So many groups of evaluations are begun on another version than their own."""
        self.withheld: list[TaskDelivery] | None = None
        """Where it is a list, evaluation tasks are kept there instead of being answered."""
        self.may_be_superseded = False
        self.logprob = -5.55
        """Of every token: about what the tiny model gives it."""
        self.behind = 0
        """So many steps older is the version of the first half of each rollout's tokens."""
        self.stops: set[str] = set()
        """Tasks that it stops early, as too old."""
        self.manifests: dict[PolicyVersion, bytes] = {}
        """Of all versions that it saw."""
        self.ended = asyncio.Event()
        self.left = asyncio.Event()
        """Set once it asks the broker for nothing any more."""

    async def play(self) -> None:
        while not self.ended.is_set():
            if self.paused or len(self.answered) >= self.most:
                await asyncio.sleep(0.01)
                continue
            for delivery in await self.port.take("player", 2, 100):
                await self._answer(delivery)
        self.left.set()

    async def release(self) -> None:
        """Answer the evaluation tasks that were withheld, and all later ones."""
        withheld, self.withheld = self.withheld or [], None
        for delivery in withheld:
            await self._answer(delivery)

    async def _answer(self, delivery: TaskDelivery) -> None:
        if self.withheld is not None and delivery.task.kind == "eval":
            self.withheld.append(delivery)
            return
        version: PolicyVersion | None = None
        while version is None or version < delivery.task.min_version:
            if self.ended.is_set():
                return
            version = await self.port.wait_head(version, 100)
        if delivery.task.kind == "eval":
            version = delivery.task.min_version
        if version not in self.manifests and (manifest := await self.port.manifest(version)):
            self.manifests[version] = manifest
        group = self.group(delivery, version)
        if await self.port.publish("player", delivery, group) == "superseded":
            assert self.may_be_superseded
        else:
            self.answered.append(delivery)

    def failed(self, delivery: TaskDelivery) -> Group:
        return Group(**_common(delivery), trajectories=(), outcome="failed", error="reward raised ValueError: no")

    def group(self, delivery: TaskDelivery, version: PolicyVersion) -> Group:
        task, common = delivery.task, _common(delivery)
        if task.task_id in self.stops:
            return Group(**common, trajectories=(), outcome="stale", error="lag 9", stopped_N=(40, 2, 0))
        if self.failing:
            return self.failed(delivery)
        members = tuple(
            self._trajectory(np.random.default_rng([task.seed, i]), version) for i in range(task.group_size)
        )
        if task.kind == "eval":
            span = VersionSpan(4, 4 + self.completion, version, "kept" if self.mixes else "fresh")
            self.mixes = max(0, self.mixes - 1)
            members = tuple(replace(member, spans=(span,)) for member in members)
        return Group(**common, trajectories=members)

    def _trajectory(self, rng: np.random.Generator, version: PolicyVersion) -> Trajectory:
        size = 4 + self.completion
        tokens = rng.integers(0, 64, size).astype(np.int32)
        tokens[:4] = 7
        mask = np.arange(size) >= 4
        logprobs = np.where(mask, self.logprob, 0).astype(np.float32)
        reward = float(tokens[-1] % 2) if self.reward is None else self.reward
        middle = 4 + self.completion // 2
        old = PolicyVersion(version.incarnation, max(self._first(version), version.step - self.behind))
        spans = (VersionSpan(4, middle, old), VersionSpan(middle, size, version, "kept"))
        return Trajectory(tokens, logprobs, mask, spans, reward, "stop")

    def _first(self, version: PolicyVersion) -> int:
        """Of the versions of its incarnation that it saw."""
        return min(known.step for known in (*self.manifests, version) if known.incarnation == version.incarnation)


def _common(delivery: TaskDelivery) -> dict[str, Any]:
    task = delivery.task
    return {
        "task_id": task.task_id,
        "attempt": delivery.attempt,
        "kind": task.kind,
        "environment": task.environment,
        "index": task.index,
        "producer": "player",
    }


class Trainers:
    """Starts trainer processes of one run; all are gone at the end."""

    def __init__(self, url: str, run_id: str, folder: Path) -> None:
        self._folder = folder
        self.environment = {**os.environ, "HEADRACE_REDIS_URL": url, "HEADRACE_RUN": run_id, "OMP_NUM_THREADS": "1"}
        self.started: list[WarmProcess] = []

    def start(self, *options: str, first: str = "", **environment: str) -> WarmProcess:
        """`first` is Python that the process runs before it becomes a trainer."""
        log = self._folder / f"trainer-{len(self.started)}.log"
        self.started.append(WarmProcess("consumers", options, {**self.environment, **environment}, log, first))
        return self.started[-1]

    def start_ranks(self, size: int, *options: str, first: str = "", **environment: str) -> list[WarmProcess]:
        """All ranks of one trainer, as `torchrun` starts them."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        told = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **environment}
        return [self.start(*options, first=first, RANK=str(rank), LOCAL_RANK=str(rank), **told) for rank in range(size)]

    async def end(self, process: WarmProcess, seconds: float = PATIENCE_S) -> str:
        """Wait for its end; returns what it wrote to stderr."""
        await asyncio.to_thread(process.wait, seconds)
        return process.log.read_text()


async def wait_until(predicate: Callable[[], bool | Awaitable[bool]], what: str) -> None:
    await wait_until_within(predicate, what, PATIENCE_S)


def lines(folder: Path) -> list[dict[str, Any]]:
    file = folder / "steps.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "trainer.jsonl").read_text().splitlines()]


async def trouble(port: Run) -> dict[str, Any]:
    """What the trainer says that it waits for, as soon as it says something."""
    found: list[dict[str, Any]] = []

    async def said() -> bool:
        found[:] = [trouble for peer in await port.peers() for trouble in peer.state.get("troubles", ())]
        return bool(found)

    await wait_until(said, "the trainer says what keeps it")
    return found[0]
