"""`headrace register`: a run for services that nobody's launcher starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from broker.api import Peer, RunRecord
from broker.connect import connect_run, connect_runs
from headrace.errors import BrokerUnavailable, ConfigError

STEPS = "--set", "run.steps=3"


def register(url: str, folder: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return headrace(url, folder, "register", "--set", "producer.engine=scripted", *arguments, **environ)


def headrace(url: str, folder: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    known = {"PYTHONPATH": str(Path.cwd()), "PATH": os.environ["PATH"], "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    if url:
        known["HEADRACE_REDIS_URL"] = url
    return subprocess.run(
        [sys.executable, "-m", "deploy.cli", *arguments],
        cwd=folder,
        env=known | environ,
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.fixture
def model(tiny_model: Path) -> tuple[str, str]:
    return "--set", f"model.path={tiny_model}"


async def test_a_run_is_registered_once_and_then_gone_on_with(
    redis_url: str, run_id: str, tmp_path: Path, model: tuple[str, str]
) -> None:
    runs = connect_runs(redis_url)

    async def recorded() -> RunRecord:
        port = connect_run(redis_url, run_id)  # which keeps what it has read once
        try:
            return await port.record()
        finally:
            await port.close()

    try:
        first = register(redis_url, tmp_path, *model, *STEPS, HEADRACE_RUN=run_id)
        assert (first.stderr, first.returncode) == ("", 0)
        assert first.stdout == f"run {run_id} is registered, its folder is {tmp_path / 'runs' / run_id}\n"
        record = await recorded()
        assert record.config["run"]["steps"] == 3
        assert (tmp_path / "runs" / run_id / "config.json").exists()

        again = register(redis_url, tmp_path, *model, *STEPS, HEADRACE_RUN=run_id)
        assert (again.stdout, again.stderr) == (first.stdout, "")
        assert await recorded() == record, "nothing is disturbed"

        more = register(redis_url, tmp_path, *model, "--set", "run.steps=5", "--run", run_id)
        assert more.stdout.endswith("; run.steps is now 5, was 3\n")
        assert (await recorded()).config["run"]["steps"] == 5

        other = register(redis_url, tmp_path, *model, "--set", "trainer.group_size=2", "--run", run_id)
        assert other.returncode == ConfigError.exit_code
        assert "a resumed run may change only" in other.stderr

        await runs.delete(run_id)
        assert register(redis_url, tmp_path, *model, "--run", run_id).returncode == 0, "Redis had lost it"
        assert (await recorded()).config["run"]["steps"] == 5
    finally:
        await runs.delete(run_id)
        await runs.close()


async def test_a_run_whose_services_somebody_started_by_hand_is_running_and_not_deleted(
    redis_url: str, run_id: str, tmp_path: Path, model: tuple[str, str]
) -> None:
    assert register(redis_url, tmp_path, *model, "--run", run_id).returncode == 0

    def states() -> tuple[str, str]:
        """What `runs list` says of it, and `status`."""
        listed = json.loads(headrace(redis_url, tmp_path, "runs", "list", "--json").stdout)
        status = json.loads(headrace(redis_url, tmp_path, "status", "--run", run_id, "--json").stdout)
        return next(row["state"] for row in listed if row["run_id"] == run_id), status["status"]

    assert states() == ("stopped", "stopped")
    port = connect_run(redis_url, run_id)
    try:
        await port.heartbeat(Peer("p1", "producer", "h", 1, True, {}), 60.0)
        assert states() == ("running", "running")
        refused = headrace(redis_url, tmp_path, "runs", "delete", run_id)
        assert refused.returncode == ConfigError.exit_code
        assert f"run {run_id} is running (p1); `headrace stop --run {run_id}` ends it first" in refused.stderr
        assert (tmp_path / "runs" / run_id).exists()
        await port.retire("p1")
        assert states() == ("stopped", "stopped")
    finally:
        await port.close()
    assert headrace(redis_url, tmp_path, "runs", "delete", run_id).returncode == 0
    assert not (tmp_path / "runs" / run_id).exists()


def test_what_is_missing_is_one_sentence(redis_url: str, tmp_path: Path, model: tuple[str, str]) -> None:
    nowhere = register("", tmp_path, *model, "--run", "r")
    assert (nowhere.returncode, "HEADRACE_REDIS_URL is not set" in nowhere.stderr) == (ConfigError.exit_code, True)
    unnamed = register(redis_url, tmp_path, *model)
    assert (unnamed.returncode, "no run is named" in unnamed.stderr) == (ConfigError.exit_code, True)
    away = register("redis://127.0.0.1:1", tmp_path, *model, "--run", "r", "--set", "broker.connect_timeout_s=0.5")
    assert away.returncode == BrokerUnavailable.exit_code
    assert len(away.stderr.splitlines()) == 1
    assert not (tmp_path / "runs" / "r").exists(), "nothing is left"
