"""Processes that have torch and transformers in them from their start: each is a fork of one that imported both.

Importing them takes several times as long as all that most tests do in such a process. `tests/e2e/` and
`tests/chaos/` start theirs as a user does.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import TimeoutExpired

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "aiohttp.web",
        "redis.asyncio",
        "tests.weight_processes",
        "torch",
        "transformers.models.auto.modeling_auto",
        "transformers.models.auto.tokenization_auto",
        "transformers.models.llama.modeling_llama",
    ]
)


class WarmProcess:
    """`python -m MODULE …` with these variables, after `first`, which is Python; its stderr goes to a file."""

    def __init__(
        self, module: str, arguments: Sequence[str], environ: Mapping[str, str], log: Path, first: str = ""
    ) -> None:
        self.log = log
        self._process = FORKS.Process(target=_become, args=(module, list(arguments), dict(environ), log, first))
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """As `subprocess` has it: None while it runs, negative when a signal ended it."""
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Nothing happens to one that has ended."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, seconds: float) -> None:
        self._process.join(seconds)
        if self.returncode is None:
            raise TimeoutExpired(str(self.log), seconds)


def _become(module: str, arguments: list[str], environ: dict[str, str], log: Path, first: str) -> None:
    os.environ.clear()
    os.environ.update(environ)
    with log.open("w") as file:
        os.dup2(file.fileno(), 2)
    sys.argv = [module, *arguments]
    exec(first, {})
    runpy.run_module(module, run_name="__main__", alter_sys=True)
