"""Whose a segment is, and whether it lives, also across pid namespaces."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support import wait_here
from weightsync.owners import Owner

ELSEWHERE = """
import os, pathlib, signal
from weightsync import owners
owners._namespace = lambda: 4026531999
owners.announce(pathlib.Path.cwd())
me = owners.Owner.this()
print(me.pid, me.start, me.namespace, flush=True)
if os.fork() == 0:
    os.execvp("sleep", ["sleep", "600"])
signal.pause()
"""


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[tuple[Owner, subprocess.Popen[str]]]:
    """A process that takes itself for one of another namespace, with a child that has nothing to do with it."""
    environ = {"PYTHONPATH": str(Path.cwd()), "PATH": "/usr/bin:/bin"}
    process = subprocess.Popen(
        [sys.executable, "-c", ELSEWHERE], cwd=tmp_path, env=environ, stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    yield Owner(*map(int, process.stdout.readline().split())), process
    subprocess.run(["pkill", "-9", "-s", str(process.pid)], check=False)
    process.communicate(timeout=30)


def test_one_of_another_namespace_lives_until_it_is_killed(
    elsewhere: tuple[Owner, subprocess.Popen[str]], tmp_path: Path
) -> None:
    owner, process = elsewhere
    assert owner.lives(tmp_path)
    assert not replace(owner, pid=owner.pid + 1).lives(tmp_path), "nobody has announced that one"
    assert [*tmp_path.iterdir()] == [], "a lock is no file"
    process.kill()
    wait_here(lambda: not owner.lives(tmp_path), "it is known to be dead, though its child lives")


def test_a_pid_that_was_used_again_is_another_owner(tmp_path: Path) -> None:
    me = Owner.this()
    assert me.lives(tmp_path)
    assert not replace(me, start=me.start + 1).lives(tmp_path)


def test_of_a_folder_that_cannot_be_asked_it_may_live(tmp_path: Path) -> None:
    assert replace(Owner.this(), namespace=1).lives(tmp_path / "missing")
