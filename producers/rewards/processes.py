"""Processes below this one: who they are, what memory they hold, and their end. Linux only."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Literal

import psutil

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
END_S = 5.0
"""How long `end_descendants` goes on: one that hangs in the kernel ends only when that lets go of it."""


def adopt_orphans() -> None:
    """Descendants whose parent ends become children of this process, whatever session they made for themselves."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """The kernel kills this process when `parent` ends; at once when it has ended."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def descendants() -> list[psutil.Process]:
    """All processes below this one, at this moment."""
    return psutil.Process().children(recursive=True)


def memory(processes: Sequence[psutil.Process], limit: int) -> int:
    """Bytes of memory that they hold; pages that they share count once where that matters for `limit`."""
    resident = sum(_held(process, "rss") for process in processes)
    # A forked child shares its pages with its parent until one of them writes. To ask for shares is slow.
    return resident if resident <= limit else sum(_held(process, "pss") for process in processes)


def reap() -> dict[int, int]:
    """Children that have ended, with their wait status."""
    ended: dict[int, int] = {}
    with suppress(ChildProcessError):
        while (child := os.waitpid(-1, os.WNOHANG))[0]:
            ended[child[0]] = child[1]
    return ended


def end_descendants() -> list[int]:
    """Kill every process below this one, which must have called `adopt_orphans` and have SIGCHLD blocked; the ids of
    those that are left.

    Without a child there is no descendant: an orphan would be one.
    """
    until = time.monotonic() + END_S
    while (left := descendants()) and time.monotonic() < until:
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        signal.sigtimedwait({signal.SIGCHLD}, 0.05)
        reap()
    return [process.pid for process in left]


def end_marked(variable: str, value: str) -> None:
    """Kill every process that was started with this in its environment, for at most `END_S`."""
    until = time.monotonic() + END_S
    while (left := _marked(variable, value)) and time.monotonic() < until:
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        time.sleep(0.05)


def _marked(variable: str, value: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(variable) == value and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _held(process: psutil.Process, kind: Literal["rss", "pss"]) -> int:
    try:
        return int(getattr(process.memory_info() if kind == "rss" else process.memory_full_info(), kind))
    except psutil.Error:
        return 0


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}) is refused")
