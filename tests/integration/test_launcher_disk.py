"""A launcher on a full disk."""

import json
import os
import resource
import signal

import pytest

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
