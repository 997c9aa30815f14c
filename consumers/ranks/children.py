"""Children: the other ranks, where rank 0 starts them itself, on its own host."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time

from headrace.errors import ServiceError

PARENT_VARIABLE = "HEADRACE_RANK_0"
"""Process id of the rank 0 that started a rank."""
LEAVE_S = 20.0
"""For children that have done their work."""
_PR_SET_PDEATHSIG = 1


class Children:
    """Ranks 1 and up."""

    def __init__(self, name: str, size: int, port: int) -> None:
        """`name` is rank 0's. Raises ServiceError when one cannot be started."""
        told = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        self._started: dict[int, subprocess.Popen[bytes]] = {}
        for rank in range(1, size):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), PARENT_VARIABLE: str(os.getpid())}
            own["HEADRACE_NAME"] = f"{name}-{rank}"
            try:
                # They share the log of this process.
                self._started[rank] = subprocess.Popen(
                    [sys.executable, "-m", "consumers"], stdin=subprocess.DEVNULL, env={**os.environ, **told, **own}
                )
            except OSError as error:
                self.close(0.0)
                raise ServiceError(f"rank {rank} of this trainer cannot be started: {error.strerror}") from error

    def dead(self, seconds: float = 0.0) -> str:
        """Which rank has died, and of what; empty where none is known to have within so many seconds."""
        until = time.monotonic() + seconds
        while True:
            for rank, process in self._started.items():
                if (code := process.poll()) is not None:
                    by = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
                    return f"rank {rank} (process {process.pid}) {by}"
            if time.monotonic() > until:
                return ""
            time.sleep(0.05)

    def close(self, patience_s: float = LEAVE_S) -> None:
        """Wait for them to leave; end who does not."""
        until = time.monotonic() + patience_s
        for process in self._started.values():
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def end_with_parent() -> None:
    """A rank that rank 0 started never outlives it. Raises ServiceError where that is gone already."""
    parent = os.environ.get(PARENT_VARIABLE, "")
    if not parent:
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if str(os.getppid()) != parent:
        raise ServiceError("the rank 0 that started this one is gone")
