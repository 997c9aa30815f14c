"""One run under chaos: its Redis, its services, its archive, and what the driver sees of it."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers.utils import logging as transformers_logging

from broker.api import RunRecord
from broker.connect import Run, connect_run, connect_runs
from broker.messages import SCHEMA
from consumers import checkpoint
from deploy.inspection import inspect
from headrace.config import Config
from headrace.errors import HeadraceError
from headrace.telemetry.journal import Journal
from tests.chaos.archive import Archive
from tests.chaos.processes import Fleet
from tests.chaos.proxy import Proxy
from tests.chaos.server import Server
from tests.tiny import save_tiny_llama
from weightsync.arena import Arena

PRODUCERS = 2
LEASE_S = 1.0
ENDLESS = 1_000_000
"""Steps of a run that goes on until the driver has had enough."""
JOIN_S = 90.0
"""What starting a service may take: the trainer loads torch first, on a machine that others share."""

MOST_SURPRISES = 3
"""Ends of services that no fault explains, before the run is given up."""


def config_of(folder: Path, model: Path, seed: int) -> Config:
    return Config.model_validate(
        {
            "run": {"folder": str(folder), "steps": ENDLESS, "seed": seed},
            "model": {"path": str(model), "dtype": "float32", "device": "cpu", "context_length": 96},
            "environments": [{"name": f"{Path(__file__).with_name('environments.py')}:Counting"}],
            "sampling": {"max_new_tokens": 16},
            "producer": {
                "count": PRODUCERS,
                "engine": "scripted",
                "engine_options": {"length_mean": 8.0, "step_s": 0.02},
                "slots": 8,
                "lease_s": LEASE_S,
                "drain_s": 2.0,
                "reward_deadline_s": 60.0,
            },
            "trainer": {"groups_per_step": 2, "group_size": 4, "learning_rate": 1e-4, "autocast": "off", "threads": 1},
            # Every other seed trains on what is left of groups that are partly too old.
            "staleness": {"stale": "mask" if seed % 2 else "drop", "max_lag": 3},
            "weights": {"lease_s": LEASE_S},
            "checkpoint": {"every": 5},
            # A task may meet many faults before it is done; a poisoned one is for tests of its own.
            "broker": {"stream_block_ms": 300, "max_deliveries": 50, "outage_s": 120.0},
        }
    )


@dataclass(slots=True)
class World:
    """What faults act on. All its files are in one folder."""

    folder: Path
    record: RunRecord
    server: Server
    proxy: Proxy
    fleet: Fleet
    archive: Archive
    journal: Journal
    random: random.Random
    operator: Run
    losses: int = 0
    """How often Redis has lost what it had answered for."""
    began: float = field(default_factory=time.monotonic)
    _follower: asyncio.Task[None] | None = None

    @classmethod
    async def make(cls, folder: Path, seed: int) -> World:
        """Redis, model and record; no service runs yet."""
        transformers_logging.disable_progress_bar()
        model = save_tiny_llama(folder / "model")
        config = config_of(folder / "runs", model, seed)
        facts = await asyncio.to_thread(inspect, config)
        server = Server(folder / "redis")
        await server.start()
        proxy = Proxy(server.port)
        await proxy.start()
        urls = (server.url, server.url.replace(str(server.port), str(proxy.port)))
        run_id = f"chaos-{seed}-{time.time_ns() % 10**9}"
        record = RunRecord(
            run_id=run_id,
            schema=SCHEMA,
            config=config.model_dump(mode="json"),
            digests=facts.digests,
            vocab_size=facts.vocab_size,
            folder=str(folder / "runs" / run_id),
            dataset_sizes=facts.dataset_sizes,
        )
        runs = connect_runs(server.url)
        await runs.create(record)
        await runs.close()
        return cls(
            folder=folder,
            record=record,
            server=server,
            proxy=proxy,
            fleet=Fleet(urls, run_id, folder / "logs", journal=Journal(Path(record.folder) / "launcher.jsonl")),
            archive=Archive(server.folder, run_id, folder / "groups.archive"),
            journal=Journal(folder / "chaos.jsonl"),
            random=random.Random(seed),
            operator=connect_run(server.url, run_id, config.broker),
        )

    async def start(self) -> None:
        self._follower = asyncio.create_task(self._follow(), name="archive")
        self.fleet.add("weights", "weightsync")
        self.fleet.add("trainer", "consumers")
        for number in range(1, PRODUCERS + 1):
            self.fleet.add(f"producer-{number}", "producers")

    async def _follow(self) -> None:
        """Redis cannot wake a reader of its file."""
        while True:
            self.archive.follow()
            await asyncio.sleep(0.1)

    @property
    def steps(self) -> int:
        """Step records so far."""
        return len(self.archive.records)

    @property
    def saved(self) -> int:
        """Step of the newest checkpoint."""
        found = checkpoint.newest(Path(self.record.folder))
        return found[0].step if found else 0

    async def progress(self, steps: int = 1, seconds: float = JOIN_S) -> None:
        """Wait until every service has joined and the trainer has made more steps since."""
        await self.until(self.all_joined, "every service has joined", seconds)
        before = self.steps
        await self.until(lambda: self.steps >= before + steps, f"{steps} more steps are made", seconds)

    async def until(self, predicate: Callable[[], Any], what: str, seconds: float = JOIN_S) -> None:
        """`wait_until`, without a new look every few milliseconds: the machine has better things to do."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if len(self.fleet.surprises) > MOST_SURPRISES:
                raise AssertionError(f"services end by themselves while waiting until {what}")
            answer = predicate()
            if await answer if asyncio.iscoroutine(answer) else answer:
                return
            await asyncio.sleep(0.1)
        raise AssertionError(f"waited {seconds:.0f} s in vain until {what}")

    async def all_joined(self) -> bool:
        """Whether the heartbeat of each service's newest process is there."""
        try:
            async with asyncio.timeout(10):
                pids = {peer.name: peer.pid for peer in await self.operator.peers() if peer.alive}
        except (HeadraceError, TimeoutError):
            return False
        return all(part.pid is not None and pids.get(name) == part.pid for name, part in self.fleet.parts.items())

    def log(self, event: str, **fields: Any) -> None:
        self.journal.write(event, at=round(time.monotonic() - self.began, 2), steps=self.steps, **fields)

    async def amend(self, steps: int) -> None:
        """Let the run end after so many steps. Only a trainer that starts afterwards knows."""
        config = json.loads(json.dumps(self.record.config))
        config["run"]["steps"] = steps
        self.record = replace(self.record, config=config)
        runs = connect_runs(self.server.url)
        await runs.amend(self.record)
        await runs.close()

    async def close(self) -> None:
        if self._follower is not None:
            self._follower.cancel()
            await asyncio.gather(self._follower, return_exceptions=True)
        await self.fleet.close()
        await self.operator.close()
        await self.proxy.close()
        self.server.crash()
        self.archive.close()
        self.journal.close()
        # What killed processes leave in shared memory, a later run's service removes; here comes none.
        Arena(run_folder=self.record.folder).sweep(self.record.run_id)
