"""A run goes on when its output breaks: nobody reads it any more, the disk is full, the terminal is gone."""

import os
import pty
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.standins import Project, running, wait_until


def begun(project: Project, out: int) -> subprocess.Popen[bytes]:
    """A run whose whole output goes to this descriptor, which then is the run's alone."""
    process = subprocess.Popen(
        [sys.executable, "-m", "deploy.cli", "up", "--model", "model", "--steps", "4"],
        cwd=project.folder,
        env=project.environ(TERM="xterm"),
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=out,
        start_new_session=True,
    )
    os.close(out)
    return process


def log_of(project: Project) -> str:
    return (project.run / "logs" / "launcher.log").read_text()


@pytest.mark.parametrize(("make", "fails"), [(os.pipe, False), (pty.openpty, True)], ids=["pipe", "terminal"])
def test_a_reader_that_leaves(make: Callable[[], tuple[int, int]], fails: bool, project: Project) -> None:
    if fails:
        (project.folder / "fail").touch()
    project.hold()
    reader, out = make()
    process = begun(project, out)
    try:
        assert os.read(reader, 1)
        os.close(reader)
        if not fails:
            running(project)
            project.let_go()
        assert process.wait(100) == (7 if fails else 0)
    finally:
        process.kill()
        process.wait(30)
    assert "<stdout> cannot be written" in log_of(project)
    assert "; nothing is shown there any more" in log_of(project)
    assert project.processes() == []


def test_a_file_on_a_full_disk_from_the_first_line(project: Project) -> None:
    process = begun(project, os.open("/dev/full", os.O_WRONLY))
    wait_until(lambda: process.poll() is not None, "the end")
    assert process.returncode == 0
    assert "<stdout> cannot be written (No space left on device)" in log_of(project)
    assert project.steps() == [1, 2, 3, 4]
