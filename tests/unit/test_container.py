"""The first process of a container, and what the health check says of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import wait_here

LOG_FOLLOWS = (
    "import sys; print('odd', 'engine: it ended. Its log:', '  a', '', '  b', sep='\\n', file=sys.stderr); sys.exit(4)"
)
FAILS = "import sys; print('weights: no room', file=sys.stderr); sys.exit(5)"
LEAVES = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
print('here', flush=True)
signal.pause()
"""

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Runs Python code as a container's service, with a /tmp of its own; what was started here is ended."""
    started: list[subprocess.Popen[str]] = []

    def begin(code: str, *flags: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "headrace.container", *flags, sys.executable, "-c", code]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        started.append(subprocess.Popen(command, env=environment(tmp_path), text=True, **pipes))
        return started[-1]

    yield begin
    for process in started:
        process.terminate()
        process.communicate(timeout=30)


def environment(folder: Path) -> dict[str, str]:
    return {"TMPDIR": str(folder), "HEADRACE_METRICS_PORT": "1"}


def probe(folder: Path) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "headrace.probe"], env=environment(folder), capture_output=True, text=True, timeout=60
    )
    assert done.stderr == ""
    return done.returncode, done.stdout


def test_what_a_service_said_last_is_its_health(start: Start, tmp_path: Path) -> None:
    process = start(FAILS)
    wait_here(lambda: "no room" in probe(tmp_path)[1], "the probe knows why")
    assert probe(tmp_path) == (1, "weights: no room (exit 5)\n")
    assert process.poll() is None, "it stays, so that somebody can ask"
    process.terminate()
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (5, "", "weights: no room\n")


def test_what_belongs_to_its_last_sentence_is_there_too(start: Start, tmp_path: Path) -> None:
    start(LOG_FOLLOWS)
    wait_here(lambda: "exit" in probe(tmp_path)[1], "the probe knows why")
    assert probe(tmp_path) == (1, "engine: it ended. Its log:\n  a\n  b (exit 4)\n")


def test_a_next_start_begins_without_last_words(start: Start, tmp_path: Path) -> None:
    (tmp_path / "headrace-last-words").write_text("of the one before\n")
    process = start(LEAVES)
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    assert probe(tmp_path)[1].startswith("nothing serves on port 1")


def test_the_signal_to_leave_reaches_the_service_which_then_leaves_at_once(start: Start) -> None:
    process = start(LEAVES)
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 3


def test_a_service_that_was_killed_is_started_again_at_once(start: Start) -> None:
    process = start("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    errors = process.communicate(timeout=30)[1]
    assert process.returncode == 128 + signal.SIGKILL
    assert errors.endswith("was ended by signal 9\n")


def test_a_clean_end_is_the_end(start: Start, tmp_path: Path) -> None:
    process = start("print('done')")
    assert process.communicate(timeout=30)[0] == "done\n"
    assert process.returncode == 0


def test_after_a_clean_end_it_stays_if_told_to(start: Start, tmp_path: Path) -> None:
    process = start("print('done')", "--stay")
    wait_here(lambda: probe(tmp_path)[0] == 0, "it is well")
    assert probe(tmp_path)[1] == "the service has ended, and waits to be told to leave\n"
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == 0


def test_what_holds_stderr_open_for_longer_keeps_nobody(start: Start) -> None:
    process = start("import subprocess; print(subprocess.Popen(['sleep', '600'], stdout=subprocess.DEVNULL).pid)")
    assert process.stdout is not None
    left = int(process.stdout.readline())
    try:
        assert process.wait(timeout=60) == 0
    finally:
        os.kill(left, signal.SIGKILL)
