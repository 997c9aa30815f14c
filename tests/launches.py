"""Runs started as a user starts them: `headrace` in a process of its own, and what is seen of it from outside."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil

from tests.living import living
from tests.support import wait_here

CHECKOUT = Path(__file__).parent.parent
MARK = "LAUNCHED_BY_TEST"
"""In the environment of every process that a test starts, and so of theirs. Its name is none of headrace's own, as the
servers that a producer starts are not given those."""


class Launches:
    """Everything that one test starts, in a folder of its own with its runs in `runs`."""

    def __init__(self, folder: Path, cwd: Path = CHECKOUT, **environ: str) -> None:
        self.folder = folder
        self.runs = folder / "runs"
        self._cwd = cwd
        # Tests run side by side, and two runs may have one id.
        self.memory = Path(tempfile.mkdtemp(prefix="headrace-test-", dir="/dev/shm"))
        self._environ = {
            "PYTHONPATH": str(CHECKOUT),
            "HOME": str(folder),
            "PATH": "/usr/bin:/bin",
            "COLUMNS": "200",
            "HEADRACE__RUN__FOLDER": str(self.runs),
            "HF_HUB_OFFLINE": "1",
            "HEADRACE_SHM_DIR": str(self.memory),
            MARK: str(folder),
            **environ,
        }
        self._started: list[subprocess.Popen[str]] = []

    def python(self, *arguments: str, **environ: str) -> subprocess.Popen[str]:
        """`python -m …` in the background; its output is kept for `end`."""
        process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            cwd=self._cwd,
            env={**self._environ, **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._started.append(process)
        return process

    def headrace(self, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """One command to its end."""
        process = self.python("deploy.cli", *arguments, **environ)
        out, err = process.communicate(timeout=220)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def up(self, *arguments: str, **environ: str) -> subprocess.Popen[str]:
        return self.python("deploy.cli", "up", *arguments, **environ)

    def processes(self) -> list[psutil.Process]:
        """All that still run, whoever started them: those that were, and theirs."""
        return living(lambda process: process.environ().get(MARK) == str(self.folder))

    def close(self) -> None:
        """Whatever the test left running ends now, launchers first: their processes end with them."""
        for process in self._started:
            process.kill()
            process.communicate(timeout=30)
        wait_here(lambda: self.processes() == [], "all processes are gone")
        shutil.rmtree(self.memory)

    @property
    def run(self) -> Path:
        """The folder of the only run."""
        (run,) = self.runs.iterdir()
        return run

    @property
    def segments(self) -> list[str]:
        """Shared-memory segments of all runs here."""
        return [file.name for file in self.memory.iterdir()]

    def events(self, journal: str = "launcher") -> list[dict[str, Any]]:
        return _lines(self.run / f"{journal}.jsonl") if self.runs.exists() else []

    def happened(self, part: str, event: str) -> int:
        return sum(line["part"] == part and line["event"] == event for line in self.events())

    def pid(self, part: str) -> int:
        """Of the part's newest process."""
        texts = [line["text"] for line in self.events() if line["part"] == part and line["text"].startswith("process ")]
        return int(texts[-1].removeprefix("process ").split()[0])

    def steps(self) -> list[int]:
        return [line["step"] for line in _lines(self.run / "steps.jsonl")] if self.runs.exists() else []

    def summary(self) -> dict[str, Any]:
        return dict(json.loads((self.run / "summary.json").read_text()))

    def url(self) -> str:
        """Of the running run's Redis."""
        return str(json.loads((self.run / "connection.json").read_text())["url"])


def _lines(file: Path) -> list[dict[str, Any]]:
    """Whole lines of a journal; its writer may be in the middle of the next."""
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().split("\n")[:-1]]
