"""Stands between this engine and a server that it started: the server ends with the process that wanted it.

`python guard.py COMMAND …`, in a session of its own; standard library only, because it is started by its path. Its
standard input is a pipe of whoever started it: at its end, which comes also when that process is killed, the whole
process group is ended. A death signal of the kernel would not do: it reaches the server but not the processes that the
server started, and comes when the thread ends that forked.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys

GRACE_S = 3.0
"""From being asked to being killed."""


def main(command: list[str]) -> int:
    """Run the command until it ends or nobody wants it any more."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    try:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL)  # noqa: S603 - what the user configured
    except OSError as error:
        print(f"headrace: {command[0]} cannot be started: {error.strerror}", flush=True)
        return 1
    wanted = _wait(server)
    code = server.poll()
    if wanted:
        print(f"headrace: the server {_in_words(code)}", flush=True)
    _end_group(server)
    return 1  # not reached where killing the group ends this process, too


def _wait(server: subprocess.Popen[bytes]) -> bool:
    """Until the server has ended (True), or nobody wants it any more (False)."""
    ended = os.pidfd_open(server.pid)
    poller = select.poll()
    poller.register(ended, select.POLLIN)
    poller.register(sys.stdin.fileno(), select.POLLIN)
    while True:
        for descriptor, _ in poller.poll():
            if descriptor == ended:
                return True
            if not os.read(descriptor, 4096):
                return False


def _end_group(server: subprocess.Popen[bytes]) -> None:
    os.killpg(0, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(GRACE_S)
    os.killpg(0, signal.SIGKILL)


def _in_words(code: int | None) -> str:
    if code is None or code >= 0:
        return f"exited with {code}"
    return f"was killed by {signal.Signals(-code).name}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
