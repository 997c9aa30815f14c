"""Stands between this engine and a server that it started: the server ends with the process that wanted it.

`python guard.py COMMAND …`, in a session of its own; standard library only, because it is started by its path. Its
standard input is a pipe of whoever started it: at its end, which comes also when that process is killed, the whole
process group is ended. A death signal of the kernel would not do: it reaches the server but not the processes that the
server started, and comes when the thread ends that forked.

The server is killed, not asked: nobody wants its answers any more, and one that is asked while its processes end sleeps
for seconds. What it then leaves in /dev/shm, semaphores and some megabytes of its own, the guard removes: it notes
which of such files the server's processes have mapped.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

LOOK_S = 10.0
"""Between two looks at what the server's processes have mapped."""
SHARED = Path("/dev/shm")  # noqa: S108 - a server's files, not ours
_LEFT = re.compile(r"(?:sem\.mp-|sgl_|sglang_|psm_).+")
"""Names of files whose maker removes them, unless it is killed."""
_MAPPED = re.compile(r"^(?:\S+ ){4}(\d+) +/dev/shm/", re.MULTILINE)
"""Inodes in /proc/PID/maps. The path there may be another: glibc makes a semaphore under a passing name."""


def main(command: list[str]) -> int:
    """Run the command until it ends or nobody wants it any more."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    try:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL)  # noqa: S603 - what the user configured
    except OSError as error:
        print(f"headrace: {command[0]} cannot be started: {error.strerror}", flush=True)
        return 1
    mapped: set[str] = set()
    wanted = _wait(server, mapped)
    code = server.poll()
    if wanted:
        print(f"headrace: the server {_in_words(code)}", flush=True)
    mapped |= left_by(os.getpgrp())
    _end_group(server)
    for file in mapped:
        Path(file).unlink(missing_ok=True)
    return 1


def _wait(server: subprocess.Popen[bytes], mapped: set[str]) -> bool:
    """Until the server has ended (True), or nobody wants it any more (False)."""
    ended = os.pidfd_open(server.pid)
    poller = select.poll()
    poller.register(ended, select.POLLIN)
    poller.register(sys.stdin.fileno(), select.POLLIN)
    while True:
        for descriptor, _ in poller.poll(LOOK_S * 1000):
            if descriptor == ended:
                return True
            if not os.read(descriptor, 4096):
                return False
        mapped |= left_by(os.getpgrp())


def _end_group(server: subprocess.Popen[bytes]) -> None:
    while others := [pid for pid in _members(os.getpgrp()) if pid != os.getpid()]:
        for pid in others:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        server.poll()
        time.sleep(0.01)


def _members(group: int) -> list[int]:
    """Living processes of a process group."""
    found = []
    for pid in (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()):
        with contextlib.suppress(OSError):
            state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
            if os.getpgid(pid) == group and state not in "ZX":
                found.append(pid)
    return found


def left_by(group: int) -> set[str]:
    """Files that would be left in shared memory if the processes of this group were killed now."""
    inodes: set[int] = set()
    for pid in _members(group):
        with contextlib.suppress(OSError):
            inodes.update(map(int, _MAPPED.findall(Path(f"/proc/{pid}/maps").read_text(errors="replace"))))
    with contextlib.suppress(FileNotFoundError):
        return {entry.path for entry in os.scandir(SHARED) if _LEFT.fullmatch(entry.name) and entry.inode() in inodes}
    return set()


def _in_words(code: int | None) -> str:
    if code is None or code >= 0:
        return f"exited with {code}"
    return f"was killed by {signal.Signals(-code).name}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
