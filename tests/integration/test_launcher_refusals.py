"""What a local run cannot be started with, or goes on without: each one sentence, and nothing left behind."""

import json
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.standins import Project, wait_until


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


LEAVES_A_PROCESS = """
import os, time
if not os.fork():
    time.sleep(300)
raise RuntimeError("with a child")
"""


@pytest.mark.parametrize(
    ("module", "sentence"),
    [
        (LEAVES_A_PROCESS, "with a child"),
        ("import os; os._exit(3)", "the process exited with 3: without a word"),
        ("def Mine(): raise SystemExit('gone')", "the process exited with 1: gone"),
    ],
    ids=["leaves a process", "ends its process", "exits"],
)
def test_what_an_environment_does_to_its_process_is_one_sentence(module: str, sentence: str, project: Project) -> None:
    (project.folder / "broken.py").write_text(module)
    process = project.up("--set", 'environments=[{name="broken.py:Mine"}]')
    _, err = process.communicate(timeout=60)
    assert process.returncode in (2, 7)
    assert sentence in err
    assert len(err.splitlines()) == 1
    assert project.processes() == []


LOADS_SLOWLY = """
import pathlib, time
from producers.environments.arithmetic import Arithmetic as Mine
pathlib.Path("loading").touch()
while not pathlib.Path("go").exists():
    time.sleep(0.01)
"""


def test_a_run_that_is_being_inspected_is_not_begun_twice(project: Project) -> None:
    (project.folder / "slow.py").write_text(LOADS_SLOWLY)
    first = project.up("--run", "r", "--set", 'environments=[{name="slow.py:Mine"}]')
    wait_until((project.folder / "loading").exists, "the first one is inspecting")
    second = project.headrace("up", "--run", "r", "--model", "model", "--steps", "9")
    assert (second.returncode, second.stderr) == (
        7,
        "headrace: run r is being started here by another command; take another --run\n",
    )
    (project.folder / "go").touch()
    _, err = first.communicate(timeout=100)
    assert (err, first.returncode) == ("", 0)
    assert json.loads((project.run / "config.json").read_text())["run"]["steps"] == 4


def test_ctrl_c_while_it_inspects_leaves_nothing(project: Project) -> None:
    (project.folder / "slow.py").write_text(LOADS_SLOWLY)
    process = project.up("--set", 'environments=[{name="slow.py:Mine"}]')
    wait_until((project.folder / "loading").exists, "it is inspecting")
    assert project.run.is_dir()
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert (err, process.returncode) == ("", 130)
    assert project.processes() == []
    assert not (project.folder / "runs").exists()


def test_a_working_folder_that_is_gone_is_one_sentence(project: Project) -> None:
    (project.folder / "gone").mkdir()
    code = "import os, sys; os.rmdir(os.getcwd()); from deploy.cli import main; sys.argv[1:] = ['up']; main()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=project.folder / "gone",
        env=project.environ(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("headrace: the working folder cannot be used (No such file or directory)")
    assert len(done.stderr.splitlines()) == 1


def test_an_empty_run_id_is_refused(project: Project) -> None:
    """A variable that is not set would otherwise begin another run."""
    done = project.headrace("up", "--run", "")
    assert (done.returncode, done.stderr[:27]) == (2, "headrace: run id '' is not ")


def test_weights_that_have_no_place_are_one_sentence(project: Project) -> None:
    process = project.up(HEADRACE_SHM_DIR="/nowhere")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 5
    assert err.startswith("headrace: HEADRACE_SHM_DIR = '/nowhere' cannot be written; set")
    assert len(err.splitlines()) == 1
    assert project.processes() == []


def test_a_taken_port_is_one_sentence(project: Project) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = project.up("--set", f"telemetry.port={port - 1}")
        _, err = process.communicate(timeout=100)
    assert process.returncode == 7
    # Somebody else on this machine may hold the one before it.
    assert re.match(rf"headrace: port ({port}|{port - 1}) on 127.0.0.1 is taken \(telemetry.port = {port - 1}", err)
    assert "choose another, or 0" in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        (
            "redis://:secret-word@127.0.0.1:1/0",
            "Redis at 127.0.0.1:1 cannot be reached (Connection refused); gave up after ",
        ),
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
