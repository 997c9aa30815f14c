"""examples/slurm.sh, with two commands of SLURM that take one machine for several nodes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.connect import connect_runs
from deploy.redis_server import find_binary
from tests.living import living
from tests.support import wait_here

CHECKOUT = Path(__file__).parents[2]
PATIENCE_S = 240.0
NODES = "127.0.0.1,127.0.0.2,127.0.0.3"
"""Names that all find each other by."""
SRUN = """#!/usr/bin/env bash
# One task on each node, with a memory of its own; all are told to leave when this is.
while [[ $1 == --* ]]; do
  case $1 in --nodelist=*) nodes=${1#*=};; esac
  shift
done
pids=()
for node in ${nodes//,/ }; do
  mkdir -p "memory/$node"
  HEADRACE_HOST=$node HEADRACE_SHM_DIR=$PWD/memory/$node "$@" >>"log-$node" 2>&1 &
  pids+=($!)
done
trap 'kill "${pids[@]}" 2>/dev/null' TERM
code=0
for pid in "${pids[@]}"; do
  until wait "$pid"; do said=$?; kill -0 "$pid" 2>/dev/null || { code=$said; break; }; done
done
exit $code
"""
SCONTROL = "#!/usr/bin/env bash\ntr , '\\n' <<<\"$3\"\n"
CONFIG = """
[run]
steps = {steps}

[model]
path = "{model}"
dtype = "float32"
context_length = 96

[sampling]
max_new_tokens = 8

[producer]
engine = "scripted"
engine_options = {{ step_s = 0.05 }}
slots = 8

[trainer]
groups_per_step = 2
group_size = 4
autocast = "off"

[broker]
stream_block_ms = 300
"""


@pytest.fixture
def job(tmp_path: Path, tiny_model: Path) -> Iterator[Path]:
    """A folder to submit it in; whatever is left of the job ends with the test."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    (commands / "redis-server").symlink_to(find_binary())
    (tmp_path / ".venv").symlink_to(CHECKOUT / ".venv")
    (tmp_path / "run.toml").write_text(CONFIG.format(steps=1_000_000, model=tiny_model))
    yield tmp_path
    for process in living(lambda process: process.cwd() == str(tmp_path)):
        process.kill()


def submit(folder: Path, port: int) -> subprocess.Popen[str]:
    environ = {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "HOME": str(folder),
        "PYTHONPATH": str(CHECKOUT),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": NODES,
        "HEADRACE_REDIS_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    command = ["bash", str(CHECKOUT / "examples" / "slurm.sh"), "run.toml"]
    return subprocess.Popen(command, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def steps(folder: Path) -> list[int]:
    file = folder / "runs" / "slurm-7" / "steps.jsonl"
    return [json.loads(line)["step"] for line in file.read_text().split("\n")[:-1]] if file.exists() else []


def test_a_trainer_that_died_ends_the_job(job: Path) -> None:
    process = submit(job, free_port())
    wait_here(lambda: len(steps(job)) >= 2, "it makes steps", PATIENCE_S)
    (trainer,) = living(lambda process: process.cwd() == str(job) and process.cmdline()[1:3] == ["-m", "consumers"])
    trainer.kill()
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 128 + signal.SIGKILL, (out, err)
    assert not living(lambda process: process.cwd() == str(job))


async def test_a_job_of_three_nodes_leaves_when_told_and_goes_on(job: Path) -> None:
    port = free_port()
    for go in range(2):
        made = len(steps(job))
        process = submit(job, port)
        wait_here(lambda made=made: len(steps(job)) >= made + 5, "it makes steps", PATIENCE_S)
        password = (job / "runs" / "redis-slurm-7" / "password").read_text().strip()
        runs = connect_runs(f"redis://:{password}@127.0.0.1:{port}/0")
        try:
            assert await runs.ids() == ["slurm-7"]
        finally:
            await runs.close()
        for node in NODES.split(",")[1:]:
            log = job / f"log-{node}"
            wait_here(lambda log=log: "weights come by shm" in log.read_text(), f"{node} has weights", PATIENCE_S)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, (go, out, err)
    assert steps(job) == list(range(1, len(steps(job)) + 1)), "no step is missing, none was made twice"
