"""`headrace dead`: entries that nobody could use, and what becomes of them."""

from __future__ import annotations

import re
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from broker.api import OperatorPort
from broker.looks import DeadLetter
from deploy.ages import age
from deploy.bodies import describe, hex_lines
from deploy.printable import printable
from headrace.errors import ConfigError, Refused, ServiceError

PAGE = 64
"""Letters asked for at once."""
_LETTER_ID = re.compile(r"[0-9]{1,20}-[0-9]{1,20}")


async def letters(operator: OperatorPort) -> AsyncIterator[DeadLetter]:
    """All of a run, the oldest first, without their bodies."""
    after = ""
    while page := await operator.dead(after, PAGE):
        for letter in page:
            after = letter.letter_id
            yield letter


async def listed(operator: OperatorPort) -> list[dict[str, Any]]:
    """The list, JSON-able."""
    now_ms = await operator.now_ms()
    return [facts(letter, now_ms) async for letter in letters(operator)]


async def replay(run_id: str, operator: OperatorPort, ids: Sequence[str]) -> None:
    """Put letters back, each for itself. Raises Refused at the end when one could not be."""
    refused = 0
    for letter_id in ids:
        try:
            await operator.replay_dead(letter_id)
        except Refused as error:
            refused += 1
            print(f"{letter_id}: {error}", file=sys.stderr)
        else:
            typer.echo(f"{letter_id}: it is back where it came from, and its task is admitted anew")
    if refused:
        raise Refused(f"{refused} of {len(ids)} letters of run {run_id} could not be replayed; the reasons stand above")
    if not ids:
        typer.echo(f"run {run_id} has no dead letters")


async def drop(run_id: str, operator: OperatorPort, ids: Sequence[str]) -> str:
    """Forget letters; returns a sentence. Raises Refused when there was none of those that were named."""
    dropped = 0
    for first in range(0, len(ids), PAGE):
        dropped += await operator.drop_dead(list(ids[first : first + PAGE]))
    if ids and not dropped:
        raise Refused(f"run {run_id} has no such dead letter: {', '.join(ids)}; `headrace dead list` shows all")
    missing = "; the rest was not there" if dropped < len(ids) else ""
    return f"dropped {dropped} of run {run_id}{missing}"


async def chosen(operator: OperatorPort, ids: Sequence[str] | None, everything: bool) -> list[str]:
    """Letters that a command means."""
    if everything:
        return [letter.letter_id async for letter in letters(operator)]
    return list(dict.fromkeys(ids or ()))


def check_choice(ids: Sequence[str] | None, everything: bool) -> None:
    """Raises ConfigError for a command that names no letter, or both some and all."""
    if everything and ids:
        raise ConfigError("name letters or say --all, not both")
    if not everything and not ids:
        raise ConfigError("name the letters, or say --all; `headrace dead list` shows their ids")
    for letter_id in ids or ():
        check_id(letter_id)


def check_id(letter_id: str) -> str:
    """The id itself. Raises ConfigError for what no letter can have."""
    if not _LETTER_ID.fullmatch(letter_id):
        raise ConfigError(f"{letter_id!r} is no id of a dead letter (they look like 1767193502123-0)")
    return letter_id


def facts(letter: DeadLetter, now_ms: int) -> dict[str, Any]:
    """Everything but the body, JSON-able, by the names that all commands use."""
    return {
        "id": letter.letter_id,
        "age_s": round(max(0, now_ms - _written_ms(letter.letter_id)) / 1000, 1),
        "source": letter.source,
        "task": letter.task_id,
        "attempt": letter.attempt,
        "kind": letter.kind,
        "bytes": letter.length,
        "sha256": letter.sha256,
        "reason": letter.reason,
    }


def table(found: Sequence[dict[str, Any]]) -> Table:
    shown = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for column in ("id", "age", "source", "task", "attempt", "bytes", "reason"):
        right = column in ("age", "attempt", "bytes")
        shown.add_column(column, justify="right" if right else "left", overflow="fold")
    for row in found:
        cells = (row["source"], row["task"], row["attempt"], f"{row['bytes']:,}", row["reason"])
        shown.add_row(row["id"], age(row["age_s"]), *(Text(printable(cell)) for cell in cells))
    return shown


def show(console: Console, letter: DeadLetter, now_ms: int) -> None:
    """One letter, whole: what the broker says of it, then its body as far as that can be read."""
    known = facts(letter, now_ms)
    kept = "" if len(letter.body) == letter.length else f", of which the first {len(letter.body):,} are kept"
    for name, value in (known | {"age_s": age(known["age_s"]), "bytes": f"{letter.length:,}{kept}"}).items():
        console.print(Text.assemble((f"{name.removesuffix('_s'):8} ", "dim"), printable(value)))
    said = describe(letter.source, letter.body)
    for line in said or hex_lines(letter.body):
        console.print(Text(f"  {line}"))


def save(letter: DeadLetter, file: Path) -> str:
    """Write the bytes that were kept; returns a sentence. Raises ServiceError when the disk refuses."""
    try:
        file.write_bytes(letter.body)
    except OSError as error:
        raise ServiceError(f"{file} cannot be written: {error.strerror}") from error
    cut = "" if len(letter.body) == letter.length else f" of {letter.length:,}; the rest was not kept"
    return f"wrote {len(letter.body):,} bytes{cut} to {file}"


def _written_ms(letter_id: str) -> int:
    return int(letter_id.partition("-")[0])
