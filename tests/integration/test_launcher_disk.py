"""A launcher on a full disk."""

import json
import os
import resource
import signal
import subprocess
import sys
import textwrap

import pytest
import redis

from tests.standins import Project, running, wait_until


def test_a_launcher_whose_journal_is_full_goes_on(project: Project) -> None:
    """A bound on the size of its files stands in for the disk."""
    project.hold()
    process = project.up()
    running(project)
    size = (project.run / "launcher.jsonl").stat().st_size
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    dead = project.pid("producer-1")
    os.kill(dead, signal.SIGKILL)

    def replaced() -> bool:
        if process.poll() is not None:
            pytest.fail(f"the run ended: {process.communicate()}")
        peers = json.loads(project.headrace("status", "--json").stdout)["processes"]
        return any(peer["role"] == "producer" and peer["alive"] and peer["pid"] != dead for peer in peers)

    wait_until(replaced, "another producer")
    assert (project.run / "launcher.jsonl").stat().st_size == size
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    project.let_go()
    out, err = process.communicate(timeout=100)
    assert (err, process.returncode) == ("", 0)
    assert "producer-1 replaced: process" in out
    assert out.count("launcher in trouble: journal") == 1
    assert "launcher goes on: its journal can be written again" in out
    assert project.happened("trainer", "ended") == 1


def test_a_run_that_finds_no_room_for_its_configuration_leaves_nothing(project: Project) -> None:
    code = """
        import resource, sys
        from deploy.cli import main
        resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500))
        sys.argv[1:] = ["up", "--model", "model"]
        main()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=project.folder,
        env=project.environ(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr.startswith("headrace: ")
    assert done.stderr.endswith("config.json cannot be written: File too large\n")
    assert len(done.stderr.splitlines()) == 1
    assert done.returncode == 7
    assert not (project.folder / "runs").exists()


def test_status_misses_nobody_where_redis_cannot_write(project: Project) -> None:
    """Heartbeats do not pass then. A folder in the place of its file stands in for the full disk."""
    project.hold()
    process = project.up()
    running(project)
    (project.run / "redis" / "dump.rdb").mkdir()
    url = json.loads((project.run / "connection.json").read_text())["url"]
    with redis.Redis.from_url(url) as client:
        client.config_set("save", "3600 1")
        client.bgsave()

        def silent() -> bool:
            status = json.loads(project.headrace("status", "--json").stdout)
            return not any(peer["alive"] for peer in status["processes"])

        wait_until(silent, "all leases have run out")
        shown = project.headrace("status").stdout
        assert f"run {project.run.name}: running" in shown
        assert "cannot write to its disk" in shown
        assert "no heartbeat passes, so that nobody can be seen" in shown
        assert "no producer plays" not in shown
        scaled = project.headrace("scale", "producer", "2")
        assert scaled.returncode == 3
        assert "cannot write to its disk" in scaled.stderr
        client.config_set("save", "")
    project.let_go()
    _, err = process.communicate(timeout=100)
    assert (err, process.returncode) == ("", 0)
