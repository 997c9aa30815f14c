"""Short real runs: a real Redis, trainer, weight service and producers, each a process; engines are scripted.

Parts are made slow from outside: the trainer by a pause in its optimizer, a producer by longer decode steps.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from audit.analysis import Audit, analyse
from audit.doctor import Wait, waits
from audit.reading import read
from broker.api import RunRecord
from broker.connect import Run, connect_run, connect_runs
from broker.messages import SCHEMA
from deploy.doctor import look
from headrace.config import BrokerConfig, Config
from headrace.policy.loading import model_digests
from tests.support import wait_until
from tests.tiny import VOCABULARY
from tests.warm import WarmProcess

PATIENCE_S = 150.0
BROKER = BrokerConfig(stream_block_ms=200, connect_timeout_s=5.0)
ENVIRONMENT = "tests/audit/slow.py:Sums"
PAUSED_OPTIMIZER = """
import time, torch
step = torch.optim.AdamW.step
def paused(self, *args, **kwargs):
    time.sleep({seconds})
    return step(self, *args, **kwargs)
torch.optim.AdamW.step = paused
"""
SLOWER_ENGINE = """
from producers.engines.scripted import ScriptedEngine
begin = ScriptedEngine.__init__
def slower(self, **options):
    begin(self, **{{**options, "step_s": {factor} * options["step_s"]}})
ScriptedEngine.__init__ = slower
"""
BEHIND_WIRE = """
from pathlib import Path
from weightsync.bulk import server
own = server.format_address
def of_the_wire(host, port):
    Path({file!r}).write_text(own(host, port))
    return "127.0.0.1:{port}"
server.format_address = of_the_wire
"""
"""A weight service whose address is that of a wire; its own is in a file."""


def config(model: Path, **sections: Mapping[str, Any]) -> Config:
    """Groups of four rollouts of 16 tokens; two groups a step; a producer plays four groups at once."""
    tree: dict[str, Any] = {
        "run": {"steps": 16},
        "model": {"path": str(model), "context_length": 96},
        "environments": [{"name": ENVIRONMENT, "label": "sums"}],
        "sampling": {"max_new_tokens": 32},
        "producer": {
            "engine": "scripted",
            "engine_options": {"length_mean": 16.0, "length_sigma": 0.1, "step_s": 0.01},
            "slots": 16,
            "lease_s": 2.0,
            "drain_s": 1.0,
        },
        "trainer": {"groups_per_step": 2, "group_size": 4, "autocast": "off"},
        "staleness": {"max_lag": 4},
        "checkpoint": {"every": 50},
        "broker": BROKER.model_dump(),
    }
    for name, values in sections.items():
        tree[name] = {**tree[name], **values} if isinstance(values, dict) else values
    return Config.model_validate(tree)


class Planted:
    """One run, and the processes of it."""

    def __init__(self, url: str, run_id: str, folder: Path, memory: Path) -> None:
        self._url, self._run_id = url, run_id
        self._folder, self._memory = folder, memory
        self.run_folder = folder / "run"
        self.started: list[WarmProcess] = []
        self.port: Run | None = None

    async def begin(self, given: Config) -> None:
        """Make its record and its folder."""
        tree = given.model_dump(mode="json")
        sizes = {"train/sums": 64, "eval/sums": 1}
        model = Path(given.model.path)
        record = RunRecord(
            self._run_id, SCHEMA, tree, model_digests(model), VOCABULARY, int(time.time() * 1000),
            str(self.run_folder), sizes,
        )  # fmt: skip
        self.run_folder.mkdir()
        (self.run_folder / "config.json").write_text(json.dumps(tree))
        runs = connect_runs(self._url, BROKER)
        await runs.create(record)
        await runs.close()
        self.port = connect_run(self._url, self._run_id, BROKER)

    def start(self, module: str, name: str, first: str = "", **environ: str) -> WarmProcess:
        known = {"HEADRACE_REDIS_URL": self._url, "HEADRACE_RUN": self._run_id, "HEADRACE_NAME": name}
        shared = {"OMP_NUM_THREADS": "1", "HEADRACE_SHM_DIR": str(self._memory)}
        log = self._folder / f"{name}.log"
        process = WarmProcess(module, (), {**os.environ, **known, **shared, **environ}, log, first)
        self.started.append(process)
        return process

    async def to_its_end(self) -> Audit:
        """Once all processes have ended in order."""
        for process in self.started:
            await asyncio.to_thread(process.wait, PATIENCE_S)
            assert process.returncode == 0, process.log.read_text()
        return analyse(read(self.run_folder))

    async def waiting(self, who: str, what: str) -> Wait:
        """What the doctor says of a service that waits, once it waits for a task that somebody has."""
        found: list[Wait] = []

        async def seen() -> bool:
            assert self.port is not None
            told = waits(await look(self._run_id, self.port))
            found[:] = [wait for wait in told if (wait.who, wait.what) == (who, what) and "with" in "".join(wait.ids)]
            return bool(found)

        await wait_until(seen, f"the doctor sees {who} wait for {what}", PATIENCE_S)
        return found[0]

    async def close(self) -> None:
        for process in self.started:
            process.kill()
            await asyncio.to_thread(process.wait, PATIENCE_S)
        if self.port is not None:
            await self.port.close()
            runs = connect_runs(self._url, BROKER)
            await runs.delete(self._run_id)
            await runs.close()
