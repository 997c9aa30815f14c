"""One child process of the launcher: started so that it can never outlive it, with its output in a log file."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from headrace.errors import ServiceError
from headrace.telemetry.clock import epoch, process_began

_PR_SET_PDEATHSIG = 1
_TAIL_BYTES = 16_384
_OFFSPRING_S = 1.0
"""How long a dead process's own children may take to leave."""

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Command:
    """What to start: an argument vector, and what is added to the environment."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    log: Path
    cores: frozenset[int] | None = None
    """CPU cores that it may run on; None leaves the choice to the kernel."""
    death_signal: signal.Signals = signal.SIGKILL
    """What the kernel sends it when the launcher is gone."""


class Child:
    """A running (or ended) child in a session of its own: Ctrl-C on the terminal reaches the launcher only."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, log_start: int) -> None:
        """`log_start` is the log's size before the start: what comes after it is this child's."""
        self._process = process
        self._pidfd = os.pidfd_open(process.pid)
        self._swept = False
        self.log = log
        self._log_start = log_start
        self.started = time.monotonic()
        self.began = epoch(process_began(process.pid))
        """By the operating system, in seconds since the epoch."""

    @classmethod
    def spawn(cls, command: Command) -> Child:
        """Start it. Raises ServiceError when the program or its log file cannot be opened."""
        try:
            command.log.parent.mkdir(parents=True, exist_ok=True)
            with command.log.open("ab") as log:
                log_start = os.fstat(log.fileno()).st_size
                process = subprocess.Popen(
                    command.argv,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **command.env},
                    start_new_session=True,
                    # Sets two attributes of the new process and imports nothing; the launcher starts no threads.
                    preexec_fn=Birth(command.death_signal, command.cores, os.getpid()),  # noqa: PLW1509
                )
        except OSError as error:
            raise ServiceError(f"{command.argv[0]} cannot be started: {error.strerror} ({error.filename})") from error
        return cls(process, command.log, log_start)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def code(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    async def exited(self) -> int:
        """Wait for its end, without a deadline: whoever needs one wraps this in a timeout."""
        if self.code is None:
            loop = asyncio.get_running_loop()
            ended = asyncio.Event()
            # A descriptor of our own, so that two waiters do not replace each other's reader.
            descriptor = os.dup(self._pidfd)
            loop.add_reader(descriptor, ended.set)
            try:
                await ended.wait()
            finally:
                loop.remove_reader(descriptor)
                os.close(descriptor)
        return self._process.wait()

    def wait(self, seconds: float) -> bool:
        """The same for callers without an event loop: True when it ended within `seconds`."""
        try:
            self._process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def terminate(self) -> None:
        """Ask it (not its own children) to leave."""
        if self.code is None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once, and whatever it started within a second at most.

        Only the first call does anything: later its number may be another process's.
        """
        if self._swept:
            return
        self._swept = True
        if self.code is None:
            self._process.kill()
        self._process.wait()
        end_group(self.pid)

    def close(self) -> None:
        """Let go of the descriptor of an ended child."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def tail(self, lines: int = 15) -> list[str]:
        """The last lines that this child (not its predecessors) wrote to its log."""
        try:
            with self.log.open("rb") as stream:
                size = stream.seek(0, os.SEEK_END)
                stream.seek(max(self._log_start, size - _TAIL_BYTES))
                text = stream.read(_TAIL_BYTES).decode("utf-8", "replace")
        except OSError as error:
            return [f"(log {self.log} cannot be read: {error.strerror})"]
        return [line for line in text.splitlines() if line.strip()][-lines:]


class Birth:
    """What a child does between fork and exec: a `preexec_fn`."""

    def __init__(self, death_signal: signal.Signals, cores: frozenset[int] | None, parent: int) -> None:
        self._death_signal = death_signal
        self._cores = cores
        self._parent = parent

    def __call__(self) -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, self._death_signal, 0, 0, 0)
        if os.getppid() != self._parent:
            # The launcher died before the kernel knew whom to tell.
            os._exit(1)
        if self._cores is not None:
            os.sched_setaffinity(0, self._cores)


def end_group(group: int) -> None:
    """End whatever is left of a process group whose leader is gone, within a second at most."""
    # Asked first: Python's resource tracker then removes the semaphores of the dead, before it leaves itself.
    _signal_group(group, signal.SIGTERM)
    deadline = time.monotonic() + _OFFSPRING_S
    while _lives(group) and time.monotonic() < deadline:
        time.sleep(0.005)
    _signal_group(group, signal.SIGKILL)


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def _lives(group: int) -> bool:
    """Whether a process group has anybody but zombies, which stay where nobody collects orphans."""
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


def describe_exit(code: int) -> str:
    """An exit code in words: "exited with 3", "was killed by SIGKILL"."""
    if code >= 0:
        return f"exited with {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
