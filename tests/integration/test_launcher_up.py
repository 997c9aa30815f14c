"""Whole local runs, with a real launcher, Redis and broker, and stand-ins for the services that need a model."""

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

PACKAGE = "__path__ = __import__('pkgutil').extend_path(__path__, __name__)\n"

SERVICE = """
import asyncio, json, os, pathlib, signal, socket, sys
from broker.api import Peer
from broker.connect import connect_run
from headrace.service import main

NAME, FOLDER = os.environ["HEADRACE_NAME"], pathlib.Path.cwd()

def serve(role, work):
    async def start(service):
        port = connect_run(os.environ["HEADRACE_REDIS_URL"], os.environ["HEADRACE_RUN"])
        record = await port.record()
        async def beat():
            stopped = False
            while not stopped:
                state = {"version": "1.0", "tokens_per_s": 100.0, "idle": 0.25}
                peer = Peer(NAME, role, socket.gethostname(), os.getpid(), True, state)
                await port.heartbeat(peer, 5.0)
                stopped = await service.sleep(0.1)
            await port.retire(NAME)
        service.add("beat", beat)
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
    await service.stopping.wait()

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
        file = self.run / "launcher.jsonl" if (self.folder / "runs").exists() else None
        if file is None or not file.exists():
            return []
        return [json.loads(line) for line in file.read_text().splitlines()]

    def happened(self, part: str, event: str) -> int:
        return sum(line["part"] == part and line["event"] == event for line in self.events())

    def pid(self, part: str) -> int:
        """Of the part's newest process."""
        texts = [line["text"] for line in self.events() if line["part"] == part and line["text"].startswith("process ")]
        return int(texts[-1].removeprefix("process ").split()[0])

    def steps(self) -> list[int]:
        return [json.loads(line)["step"] for line in (self.run / "steps.jsonl").read_text().splitlines()]

    def processes(self) -> list[psutil.Process]:
        """Everything that runs in this folder."""
        found = []
        for process in psutil.process_iter():
            try:
                if Path(process.cwd()).is_relative_to(self.folder) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    made = Project(tmp_path)
    yield made
    for process in made.started:
        process.kill()
        process.communicate(timeout=30)
    wait_until(lambda: made.processes() == [], "all processes are gone")


def wait_until(predicate: Callable[[], bool], what: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not predicate():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.02)


def running(project: Project, *parts: str) -> None:
    for part in parts or ("trainer", "weights", "producer-1"):
        wait_until(lambda part=part: project.happened(part, "joined") > 0, f"{part} joined")  # type: ignore[misc]


def test_a_run_goes_to_its_end(project: Project) -> None:
    process = project.up()
    out, err = process.communicate(timeout=100)
    assert (err, process.returncode) == ("", 0)
    assert "step 4/4  reward  0.50  accuracy  25%  lag 1.0" in out
    assert "held-out accuracy after" in out
    summary = json.loads((project.run / "summary.json").read_text())
    assert summary["wall_s"] > 0
    assert summary["balance"]["train"]["closed"] is True
    assert project.processes() == []
    assert not (project.run / "connection.json").exists()
    assert any((project.run / "redis").glob("appendonly*"))
    listed = json.loads(project.headrace("runs", "list", "--json").stdout)
    assert [(row["state"], row["step"]) for row in listed] == [("finished", 4)]


def test_no_secret_is_shown(project: Project) -> None:
    project.hold()
    process = project.up()
    running(project)
    connection = project.run / "connection.json"
    assert stat.S_IMODE(connection.stat().st_mode) == 0o600
    password = json.loads(connection.read_text())["url"].removeprefix("redis://:").partition("@")[0]
    assert len(password) > 20
    for child in project.processes():
        assert password not in " ".join(child.cmdline())
    project.let_go()
    out, err = process.communicate(timeout=100)
    assert password not in out + err
    holders = [file.name for file in project.run.rglob("*") if file.is_file() and password in file.read_text("latin-1")]
    assert holders == ["redis.conf"]


def test_ctrl_c_stops_cleanly_and_resume_goes_on(project: Project) -> None:
    project.hold()
    process = project.up()
    running(project)
    wait_until(lambda: project.steps() == [1, 2], "two steps")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=100)
    assert (err, process.returncode) == ("", 130)
    assert f"headrace up --resume --run {project.run.name}" in out
    assert project.processes() == []
    for part in ("trainer", "producer-1", "weights"):
        assert {"part": part, "text": "exited with 0"}.items() <= next(
            line for line in project.events() if line["part"] == part and line["event"] == "left"
        ).items()
    project.let_go()
    again = project.up("--resume")
    out, err = again.communicate(timeout=100)
    assert (err, again.returncode) == ("", 0)
    assert project.steps() == [1, 2, 3, 4]
    assert "step 3/4" in out
    assert "step 2/4" not in out


def test_a_finished_run_goes_on_with_more_steps(project: Project) -> None:
    assert project.up().wait(100) == 0
    assert project.steps() == [1, 2, 3, 4]
    project.hold()
    again = project.up("--resume", "--steps", "6")
    running(project)
    assert not (project.run / "summary.json").exists()
    project.let_go()
    out, err = again.communicate(timeout=100)
    assert (err, again.returncode) == ("", 0)
    assert project.steps() == [1, 2, 3, 4, 5, 6]
    assert "run changed: run.steps is now 6, was 4" in out


def test_a_second_ctrl_c_ends_everything_at_once(project: Project) -> None:
    project.hold()
    (project.folder / "producers-hang").touch()
    process = project.up()
    running(project)
    process.send_signal(signal.SIGINT)
    wait_until(lambda: project.happened("trainer", "left") == 1, "the trainer left")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
    assert project.processes() == []
    assert any((project.run / "redis").glob("appendonly*"))


def test_a_killed_producer_is_replaced(project: Project) -> None:
    project.hold()
    process = project.up()
    running(project)
    os.kill(project.pid("producer-1"), signal.SIGKILL)
    wait_until(lambda: project.happened("producer-1", "joined") == 2, "the replacement joined")
    project.let_go()
    out, _ = process.communicate(timeout=100)
    assert process.returncode == 0
    assert "producer-1 died" in out


@pytest.mark.parametrize("part", ["trainer", "weights"])
def test_a_killed_service_is_started_again(part: str, project: Project) -> None:
    project.hold()
    process = project.up()
    running(project)
    wait_until(lambda: project.steps() == [1, 2], "two steps")
    os.kill(project.pid(part), signal.SIGKILL)
    wait_until(lambda: project.happened(part, "joined") == 2, "the replacement joined")
    project.let_go()
    _, err = process.communicate(timeout=100)
    assert (err, process.returncode) == ("", 0)
    assert project.steps() == [1, 2, 3, 4]


def test_a_killed_redis_is_started_again(project: Project) -> None:
    project.hold()
    process = project.up()
    running(project)
    (redis,) = [child for child in project.processes() if "redis-server" in child.name()]
    redis.kill()
    wait_until(lambda: project.happened("redis", "replaced") == 1, "Redis is back")
    project.let_go()
    _, err = process.communicate(timeout=100)
    assert (err, process.returncode) == ("", 0)


def test_nothing_survives_a_killed_launcher_and_the_run_can_go_on(project: Project) -> None:
    project.hold()
    process = project.up()
    running(project)
    process.kill()
    wait_until(lambda: project.processes() == [], "all are gone")
    assert "is not running" in project.headrace("status", "--run", project.run.name).stderr
    project.let_go()
    again = project.up("--resume")
    _, err = again.communicate(timeout=100)
    assert (err, again.returncode) == ("", 0)


def test_scale_status_and_stop(project: Project) -> None:
    project.hold()
    process = project.up()
    running(project)
    assert project.headrace("scale", "producer", "2").stdout == "2 producers: producer-2 joined\n"
    status = json.loads(project.headrace("status", "--json").stdout)
    names = {peer["name"] for peer in status["processes"] if peer["alive"]}
    assert {"producer-1", "producer-2", "trainer", "weights", "launcher"} <= names
    assert status["balance"]["train"]["closed"] is True
    shown = project.headrace("status").stdout
    assert f"run {project.run.name}: running" in shown
    assert "producer-2" in shown
    assert project.headrace("scale", "producer", "1").stdout == "1 producers: producer-2 drained and left\n"
    assert project.headrace("scale", "producer", "1").stdout == "1 producers: nothing to do\n"
    refused = project.headrace("runs", "delete", project.run.name)
    assert "is running; `headrace stop" in refused.stderr
    assert refused.returncode == 2
    busy = project.headrace("up", "--model", "model", "--resume", "--run", project.run.name)
    assert "already running here" in busy.stderr
    assert busy.returncode == 7
    stopped = project.headrace("stop")
    assert (stopped.stdout, stopped.returncode) == (f"run {project.run.name} stopped\n", 0)
    process.communicate(timeout=30)
    assert process.returncode == 0
    assert project.processes() == []
    name = project.run.name
    assert project.headrace("runs", "delete", name).stdout == f"deleted {project.folder}/runs/{name}\n"
    assert list((project.folder / "runs").iterdir()) == []


def test_stop_uses_force_on_a_producer_that_hangs(project: Project) -> None:
    project.hold()
    (project.folder / "producers-hang").touch()
    process = project.up()
    running(project)
    stopped = project.headrace("stop", "--patience", "0.5")
    assert stopped.stdout == f"run {project.run.name} stopped, by force\n"
    process.communicate(timeout=30)
    assert project.processes() == []


def test_a_producer_that_cannot_start_ends_the_run_with_its_log(project: Project) -> None:
    (project.folder / "producers-fail").touch()
    project.hold()
    process = project.up()
    _, err = process.communicate(timeout=100)
    assert process.returncode == 7
    assert "headrace: producer-1 exited with 1; it died 4 times in a row, before it had joined the run" in err
    assert "Traceback: something broke" in err
    assert project.processes() == []


def test_a_model_or_environment_that_does_not_serve_starts_nothing(project: Project) -> None:
    (project.folder / "broken.py").write_text("raise RuntimeError('not today')\n")
    for arguments, code, sentence in (
        (("--set", 'environments=[{name="broken.py:Mine"}]'), 2, "not today"),
        (("--model", "producers"), 2, "has no config.json"),
    ):
        process = project.up(*arguments)
        out, err = process.communicate(timeout=100)
        assert process.returncode == code
        assert sentence in err
        assert len(err.splitlines()) == 1
        assert "Redis" not in out
        assert not (project.folder / "runs").exists()


def test_a_taken_port_is_one_sentence(project: Project) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = project.up("--set", f"telemetry.port={port - 1}")
        _, err = process.communicate(timeout=100)
    assert process.returncode == 7
    assert err.startswith(f"headrace: port {port} on 127.0.0.1 is taken")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("redis://:secret-word@127.0.0.1:1/0", "Redis at 127.0.0.1:1 cannot be reached"),
        ("http://secret-word", "the Redis URL must look like"),
        ("memory:", "memory: is one process's own broker"),
    ],
)
def test_a_redis_that_cannot_be_reached_is_one_sentence(url: str, sentence: str, project: Project) -> None:
    process = project.up("--set", "broker.connect_timeout_s=0.5", HEADRACE_REDIS_URL=url)
    out, err = process.communicate(timeout=100)
    assert process.returncode in (2, 3)
    assert sentence in err
    assert "secret-word" not in out + err
    assert not (project.folder / "runs").exists()
    assert len(err.splitlines()) == 1
    assert project.processes() == []


def test_two_runs_share_one_redis(project: Project, tmp_path: Path) -> None:
    from deploy.redis_server import RedisServer

    server = RedisServer(tmp_path / "shared", tmp_path / "shared.log")
    try:
        server.start()
        wrong = server.url.replace("redis://:", "redis://:wrong")
        refused = project.up(HEADRACE_REDIS_URL=wrong)
        _, err = refused.communicate(timeout=100)
        assert refused.returncode == 3
        assert "refuses the user or the password" in err
        assert len(err.splitlines()) == 1
        for run in ("one", "two"):
            process = project.up("--run", run, HEADRACE_REDIS_URL=server.url)
            _, err = process.communicate(timeout=100)
            assert (err, process.returncode) == ("", 0)
        environ = {"HEADRACE_REDIS_URL": server.url}
        assert "holds 2 runs; name one with --run" in project.headrace("status", **environ).stderr
        assert "run one: finished, step 4" in project.headrace("status", "--run", "one", **environ).stdout
        assert "keys and" in project.headrace("runs", "delete", "one", **environ).stdout
        assert "run two: finished, step 4" in project.headrace("status", **environ).stdout
    finally:
        server.stop()
