"""`headrace env check`: an environment played a few times in a process of its own, and what is wrong with it.

The child (`deploy/env_check_child.py`) says on a pipe what it calls next and what it found. Wait graph: this process
waits for its next line, as long as that call may take, then ends it with all that it started: so an environment that
hangs, blocks, or takes its process down is a finding as any other.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from rich.console import Console
from rich.text import Text

from deploy.printable import printable
from deploy.processes import Birth, describe_exit, end_group
from headrace.config import Config
from headrace.objects import shortened

Level = Literal["error", "warning"]
GRACE_S = 5.0
"""Beyond what a call may take: the child itself ends one that only waits."""
START_S = 120.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it should be, in a sentence with the way out."""

    level: Level
    sentence: str


@dataclass(slots=True)
class Report:
    """What came of one environment."""

    name: str
    findings: list[Finding] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def fine(self) -> bool:
        return not any(finding.level == "error" for finding in self.findings)


@dataclass(frozen=True, slots=True)
class Question:
    """What the child is asked; it goes there as JSON."""

    config: str
    name: str
    """Of `config.environments`, by what tasks call it."""
    model: str
    """Folder whose tokenizer is used; "" is bytes."""

    def text(self) -> str:
        return json.dumps(asdict(self))


def check(config: Config, name: str, model: str) -> Report:
    """Raises ServiceError when no child can be started."""
    report = Report(name)
    question = Question(config.model_dump_json(), name, model)
    with tempfile.TemporaryFile() as chatter:
        child, answers = _start(question, chatter)
        try:
            at = _follow(child, answers, report)
            if at is not None:
                report.findings.append(_end_of(child, at, chatter))
        finally:
            os.close(answers)
            child.kill()
            child.wait()
            end_group(child.pid)
    return report


def _start(question: Question, chatter: IO[bytes]) -> tuple[subprocess.Popen[bytes], int]:
    """The child, and the pipe that it answers on."""
    answers, theirs = os.pipe()
    try:
        child = subprocess.Popen(
            [sys.executable, "-m", "deploy.env_check_child", str(theirs)],
            stdin=subprocess.PIPE,
            stdout=chatter,
            stderr=chatter,
            pass_fds=(theirs,),
            start_new_session=True,
            preexec_fn=Birth(signal.SIGKILL, None, os.getpid()),  # noqa: PLW1509
        )
    finally:
        os.close(theirs)
    assert child.stdin is not None
    with child.stdin:
        child.stdin.write(question.text().encode())
    return child, answers


@dataclass(slots=True)
class _At:
    """What the child is doing."""

    what: str = "it starts"
    limit_s: float = START_S
    hangs: bool = False


def _follow(child: subprocess.Popen[bytes], answers: int, report: Report) -> _At | None:
    """Fill the report; returns where the child is when it ended before its end, or does not go on."""
    at = _At()
    for line in _lines(child, answers, at):
        match line:
            case {"at": str(what), "limit_s": limit_s}:
                at.what, at.limit_s = what, float(limit_s)
            case {"level": level, "sentence": str(sentence)}:
                report.findings.append(Finding(level, sentence))
            case {"facts": dict(facts)}:
                report.facts.update(facts)
            case {"end": _}:
                return None
    return at


def _lines(child: subprocess.Popen[bytes], answers: int, at: _At) -> Iterator[Mapping[str, Any]]:
    """Until the child has ended, or is silent for longer than it may be: `at.hangs` then."""
    gone = os.pidfd_open(child.pid)
    os.set_blocking(answers, False)
    rest, since = b"", time.monotonic()
    try:
        while True:
            patience_s = since + at.limit_s + GRACE_S - time.monotonic()
            ready, _, _ = select.select([answers, gone], [], [], max(0.0, patience_s))
            if answers in ready:
                block = os.read(answers, 1 << 16)
                *lines, rest = (rest + block).split(b"\n")
                since = time.monotonic()
                yield from filter(None, map(_said, lines))
                if block:
                    continue
            if not ready:
                at.hangs = True
            if not ready or gone in ready or not block:
                return
    finally:
        os.close(gone)


def _said(line: bytes) -> Mapping[str, Any] | None:
    """None for what is no line of the child's own: an environment may write wherever it likes."""
    try:
        said = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return said if isinstance(said, dict) else None


def _end_of(child: subprocess.Popen[bytes], at: _At, chatter: IO[bytes]) -> Finding:
    if at.hangs and at.what.startswith(("score", "correct")):
        return Finding(
            "error",
            f"{at.what} did not return within {at.limit_s + GRACE_S:g} s; its worker process would be killed after "
            f"producer.reward_deadline_s = {at.limit_s:g} s, and the rollout fail",
        )
    if at.hangs:
        return Finding(
            "error",
            f"{at.what} has blocked everything for {at.limit_s + GRACE_S:g} s, and a producer with it; code that waits "
            f"or computes for long must be awaitable (asyncio.to_thread makes it so), and must come to an end",
        )
    code = child.wait()
    chatter.seek(0)
    said = chatter.read().decode("utf-8", "replace").strip().splitlines()
    last = f" ({shortened(said[-1])})" if said else ""
    return Finding("error", f"its process {describe_exit(code)} where {at.what}{last}; nothing in it may end a process")


def show(report: Report, console: Console) -> None:
    """For a person."""
    for finding in report.findings:
        console.print(
            Text.assemble(
                (f"{finding.level}: ", "red" if finding.level == "error" else "yellow"), printable(finding.sentence)
            )
        )
    if report.fine:
        verdict = "nothing is wrong" if report.findings else "OK"
        console.print(Text.assemble((f"{report.name}: {verdict}", "green")))
    for what, value in report.facts.items():
        lines = printable(str(value).replace("\n", " ⏎ "))
        console.print(Text.assemble((f"  {what:<16}", "dim"), lines))


def as_json(report: Report) -> dict[str, Any]:
    return {
        "environment": report.name,
        "ok": report.fine,
        "findings": [asdict(finding) for finding in report.findings],
        "facts": report.facts,
    }


def tokenizer_folder(config: Config, *, named: bool) -> str:
    """The model's folder when there is one; the default model's only when it was prepared before.

    Raises ModelError for a model that was `named` and cannot be used.
    """
    from headrace.policy.prepare import SMOLLM2, cache_folder, resolve_model

    if config.model.path == SMOLLM2 and not named and not any(cache_folder().glob("smollm2-*/config.json")):
        return ""
    return str(Path(resolve_model(config.model.path)).resolve())
