"""A folder with a real launcher, Redis and broker, and stand-ins for the services that need a model."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests.living import living
from tests.support import wait_here

PACKAGE = "__path__ = __import__('pkgutil').extend_path(__path__, __name__)\n"

SERVICE = """
import asyncio, json, os, pathlib, signal, socket, sys
from broker.api import Peer
from broker.connect import open_run
from headrace.service import main

NAME, FOLDER = os.environ["HEADRACE_NAME"], pathlib.Path.cwd()

async def held(role, at):
    while (FOLDER / f"{role}-{at}").exists():
        await asyncio.sleep(0.02)

def serve(role, work):
    async def start(service):
        await held(role, "comes")
        record, _, port = await open_run(os.environ["HEADRACE_REDIS_URL"], os.environ["HEADRACE_RUN"])
        await port.record()
        # From here on no order is missed.
        await port.orders("$", 1)
        await held(role, "loads")
        async def beat():
            stopped = False
            while not stopped:
                state = {"version": "1.0", "tokens_per_s": 100.0, "idle": 0.25}
                peer = Peer(NAME, role, socket.gethostname(), os.getpid(), True, state)
                await port.heartbeat(peer, 5.0)
                stopped = await service.sleep(0.1)
            await port.retire(NAME)
        async def hasten():
            await service.stopping.wait()
            port.hasten()
        service.add("beat", beat)
        service.add("hasten", hasten)
        service.add("work", lambda: work(service, port, record))
    sys.exit(main(NAME, start, drain_s=60.0))
"""

PRODUCER = """
import standin
if (standin.FOLDER / "producers-fail").exists():
    sys = standin.sys
    print("Traceback: something broke", file=sys.stderr)
    sys.exit(1)

async def work(service, port, record):
    if (standin.FOLDER / "producers-hang").exists():
        standin.asyncio.get_running_loop().add_signal_handler(standin.signal.SIGTERM, lambda: None)
        await standin.asyncio.Event().wait()
    await service.stopping.wait()

standin.serve("producer", work)
"""

TRAINER = """
import standin
from standin import json, pathlib

async def work(service, port, record):
    run = pathlib.Path(record.folder)
    checkpoint = run / "checkpoint"
    step = int(checkpoint.read_text()) if checkpoint.exists() else 0
    if step and "--resume" not in standin.sys.argv:
        standin.sys.exit("there is a checkpoint; --resume is missing")
    fence = await port.take_fence(0)
    async def weights():
        return [peer for peer in await port.peers() if peer.name == "weights" and peer.alive]
    if (standin.FOLDER / "fail").exists():
        while not await weights():
            await service.sleep(0.05)
        await port.finish(fence, "failed", "it had to")
        while await weights():
            await service.sleep(0.05)
        print("trainer: it had to", file=standin.sys.stderr)
        standin.sys.exit(7)
    while step < record.config["run"]["steps"]:
        if service.stopping.is_set():
            return
        if step >= 2 and (standin.FOLDER / "hold").exists():
            await service.sleep(0.05)
            continue
        step += 1
        await port.set_step(fence, step)
        checkpoint.write_text(str(step))
        with (run / "steps.jsonl").open("a") as steps:
            steps.write(json.dumps({"step": step, "reward": 0.5, "accuracy": 0.25, "lag": 1.0}) + "\\n")
    (run / "summary.json").write_text(json.dumps({"accuracy_before": 0.2, "accuracy_after": 0.9, "steps": step}))
    await port.finish(fence, "finished", "")
    service.stop("done")

standin.serve("trainer", work)
"""

WEIGHTS = """
import standin

async def work(service, port, record):
    while not service.stopping.is_set():
        for order in await port.orders("$", 200):
            if order.kind == "end":
                service.stop("the run has ended")

standin.serve("weights", work)
"""


class Project:
    """A working folder with a model folder, and stand-ins that `python -m` finds before the real services."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[subprocess.Popen[str]] = []
        (folder / "standin.py").write_text(SERVICE)
        for name, code in (("producers", PRODUCER), ("consumers", TRAINER), ("weightsync", WEIGHTS)):
            (folder / name).mkdir()
            (folder / name / "__init__.py").write_text(PACKAGE)
            (folder / name / "__main__.py").write_text(code)
        model = folder / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps({"architectures": ["TinyForCausalLM"], "vocab_size": 7}))
        (model / "model.safetensors").write_bytes(b"weights")
        (model / "tokenizer.json").write_text("{}")

    def environ(self, **more: str) -> dict[str, str]:
        return {"PYTHONPATH": str(Path.cwd()), "HOME": str(self.folder), "PATH": "/usr/bin:/bin", **more}

    def headrace(self, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "deploy.cli", *arguments],
            cwd=self.folder,
            env=self.environ(COLUMNS="200", **environ),
            capture_output=True,
            text=True,
            timeout=100,
        )

    def up(self, *arguments: str, **environ: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "deploy.cli", "up", "--model", "model", "--steps", "4", *arguments],
            cwd=self.folder,
            env=self.environ(**environ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def hold(self) -> None:
        (self.folder / "hold").touch()

    def let_go(self) -> None:
        (self.folder / "hold").unlink()

    @property
    def run(self) -> Path:
        (run,) = (self.folder / "runs").iterdir()
        return run

    def events(self) -> list[dict[str, Any]]:
        """Of the run; none before the launcher has begun its journal."""
        files = (self.folder / "runs").glob("*/launcher.jsonl")
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]

    def happened(self, part: str, event: str) -> int:
        return sum(line["part"] == part and line["event"] == event for line in self.events())

    def pid(self, part: str) -> int:
        """Of the part's newest process."""
        texts = [line["text"] for line in self.events() if line["part"] == part and line["text"].startswith("process ")]
        return int(texts[-1].removeprefix("process ").split()[0])

    def steps(self) -> list[int]:
        file = self.run / "steps.jsonl"
        return [json.loads(line)["step"] for line in file.read_text().splitlines()] if file.exists() else []

    def processes(self) -> list[psutil.Process]:
        """Everything that runs in this folder."""
        return living(lambda process: Path(process.cwd()).is_relative_to(self.folder))


def wait_until(predicate: Callable[[], bool], what: str) -> None:
    """Long enough for whole processes on a busy machine."""
    wait_here(predicate, what, 120)


def running(project: Project, *parts: str) -> None:
    for part in parts or ("trainer", "weights", "producer-1"):
        wait_until(lambda part=part: project.happened(part, "joined") > 0, f"{part} joined")  # type: ignore[misc]
