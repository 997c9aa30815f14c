"""`python -m headrace.container COMMAND…`: the first process of a container, around a service.

A container whose service fails at once is gone before its health check asks, and nothing but a restart is seen of it.
So the service's last words on stderr are kept in a file, where `headrace.probe` finds them, and the container stays for
`STAY_S` before it leaves with the service's exit code. With `--stay` it also stays after a clean end that nobody asked
for, until it is told to leave: for an orchestrator that would start an ended service again. Of one that was killed
it says so, and whether the container's memory was too small, since that service cannot.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import IO

LAST_WORDS = Path(tempfile.gettempdir()) / "headrace-last-words"
"""Of the service that failed; in a file system of this container's own."""
ENDED = Path(tempfile.gettempdir()) / "headrace-ended"
"""There while the container stays after a clean end."""
SERVED = Path(tempfile.gettempdir()) / "headrace-served"
"""There once the health check has found the service well; before that it may only be slow to load."""
STAY_S = 30.0
"""Several rounds of a health check."""
LONGEST = 16 << 10
FLUSH_S = 2.0
LEAVING = {signal.SIGTERM, signal.SIGINT}
CLEAN = (0, 130)
TOO_SMALL = (
    "this container's memory limit is too small for it; raise that (of compose.yaml by HEADRACE_TRAINER_MEMORY, "
    "HEADRACE_PRODUCER_MEMORY, HEADRACE_WEIGHTS_MEMORY or HEADRACE_PREPARE_MEMORY)"
)
OOM_COUNTS = (Path("/sys/fs/cgroup/memory.events"), Path("/sys/fs/cgroup/memory/memory.oom_control"))
"""Of this container, cgroup version 2 and 1: `oom_kill N` is how many of its processes the kernel has killed."""


class Contained:
    """One service and what it said last."""

    def __init__(self, command: list[str]) -> None:
        """Raises OSError where there is no such command."""
        self.told = False
        """Whether somebody asked it to leave."""
        self._child: subprocess.Popen[bytes] | None = None
        for number in LEAVING:
            signal.signal(number, self._pass_on)
        self._child = subprocess.Popen(command, stderr=subprocess.PIPE)  # noqa: S603 - what this container is for
        if self.told:
            self._child.terminate()
        self._last = b""

    def wait(self) -> int:
        """Its exit code as a shell gives it; what it writes to stderr goes to ours meanwhile."""
        assert self._child is not None
        assert self._child.stderr is not None
        # What it started may hold its stderr open for longer than it lives.
        reader = threading.Thread(target=self._copy, args=(self._child.stderr,), daemon=True)
        reader.start()
        code = self._child.wait()
        reader.join(FLUSH_S)
        return 128 - code if code < 0 else code

    @property
    def last_words(self) -> str:
        return self._last.decode("utf-8", "replace").strip()

    def _copy(self, stream: IO[bytes]) -> None:
        while line := stream.readline(LONGEST):
            sys.stderr.buffer.write(line)
            sys.stderr.buffer.flush()
            if line.strip():
                # What is indented belongs to the sentence before it.
                self._last = (self._last + line)[:LONGEST] if line[:1].isspace() else line

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.told = True
        if self._child is not None:
            self._child.send_signal(number)


def main(arguments: list[str]) -> int:
    stays = arguments[:1] == ["--stay"]
    command = arguments[1:] if stays else arguments
    if not command:
        print("usage: python -m headrace.container [--stay] COMMAND…", file=sys.stderr)
        return 2
    for file in (LAST_WORDS, ENDED, SERVED):
        file.unlink(missing_ok=True)
    killed_before = killed_for_memory()
    service = Contained(command)
    code = service.wait()
    if service.told:
        return code
    said = f"{service.last_words or 'it said nothing'} (exit {code})"
    starved = code == 128 + signal.SIGKILL and killed_for_memory() > killed_before
    if code > 128 and code not in CLEAN:
        said = f"{' '.join(command)} was ended by signal {code - 128}{f': {TOO_SMALL}' if starved else ''}"
        print(said, file=sys.stderr)
    if code in CLEAN and stays:
        ENDED.touch()
        _stay(None)
    elif code not in CLEAN and (code < 128 or starved):
        LAST_WORDS.write_text(f"{said}\n", encoding="utf-8")
        _stay(STAY_S)
    return code


def killed_for_memory() -> int:
    """How many processes of this container the kernel has killed for its memory limit; 0 where it does not say."""
    for file in OOM_COUNTS:
        if file.exists():
            counts = dict(line.split() for line in file.read_text(encoding="ascii").splitlines())
            return int(counts.get("oom_kill", 0))
    return 0


def _stay(seconds: float | None) -> None:
    """Until somebody asks to leave, at most so long."""
    signal.pthread_sigmask(signal.SIG_BLOCK, LEAVING)
    if seconds is None:
        signal.sigwait(LEAVING)
    else:
        signal.sigtimedwait(LEAVING, seconds)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
