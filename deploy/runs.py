"""`headrace runs`: what runs there are, and deleting one with everything it left."""

from __future__ import annotations

import json
import shutil
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.table import Table
from rich.text import Text

from broker.api import Runs
from deploy.printable import printable
from deploy.progress import newest_step
from deploy.run_folder import RunFolder, local_runs
from headrace.errors import ConfigError, ServiceError
from headrace.words import counted
from weightsync.arena import Arena


@dataclass(frozen=True, slots=True)
class RunRow:
    run_id: str
    state: str
    """"running", "finished", "failed", "stopped", "damaged"; "in the broker" for one that neither runs nor has a folder
    here."""
    step: int | None
    folder: str
    reason: str = ""
    """Why it failed, or what of its folder cannot be read."""


async def rows(folder: Path, broker: Runs | None, living: Callable[[str], Awaitable[Sequence[str]]]) -> list[RunRow]:
    """Runs of this folder, oldest first, then those that only the broker knows.

    `living` names the services of a run that the broker knows to live, whoever started them.
    """
    here = [_row_of_any(run) for run in local_runs(folder)]
    known = {row.run_id for row in here}
    ids = sorted(await broker.ids()) if broker is not None else []
    found = here + [RunRow(run_id, "in the broker", None, "") for run_id in ids if run_id not in known]
    alive = {run_id for run_id in ids if await living(run_id)}
    return [replace(row, state="running", reason="") if row.run_id in alive else row for row in found]


def _row_of_any(run: RunFolder) -> RunRow:
    """Also of a folder that somebody damaged: the others are to be listed all the same."""
    try:
        return _row(run)
    except ServiceError as error:
        return RunRow(run.run_id, "damaged", None, str(run.path), str(error))


def _row(run: RunFolder) -> RunRow:
    failure = run.read_json(run.failure_file)
    if run.live:
        state = "running"
    elif run.summary_file.exists():
        state = "finished"
    else:
        state = "stopped" if failure is None else "failed"
    reason = str((failure or {}).get("reason", "")) if state == "failed" else ""
    return RunRow(run.run_id, state, newest_step(run.steps_file), str(run.path), reason)


async def delete(run_id: str, folder: Path, broker: Runs | None, alive: Sequence[str] = ()) -> str:
    """Delete folder, keys and segments; returns what was deleted. `alive` are services that the broker knows to live.

    Raises ConfigError for a live or unknown run.
    """
    run = RunFolder(folder / run_id)
    if run.live or alive:
        who = f" ({', '.join(alive)})" if alive else ""
        raise ConfigError(f"run {run_id} is running{who}; `headrace stop --run {run_id}` ends it first")
    in_broker = broker is not None and run_id in await broker.ids()
    if not run.config_file.exists() and not in_broker:
        raise ConfigError(f"there is no run {run_id} in {folder}; `headrace runs list` names all")
    deleted = []
    if broker is not None and in_broker:
        deleted.append(counted(await broker.delete(run_id), "key"))
    if run.config_file.exists():
        try:
            shutil.rmtree(run.path)
        except OSError as error:
            raise ServiceError(f"run folder {run.path} cannot be deleted: {error.strerror}") from error
        deleted.append(str(run.path))
    Arena(run_folder=run.path).sweep(run_id)
    return " and ".join(deleted)


def to_json(found: list[RunRow]) -> str:
    return json.dumps([asdict(row) for row in found], indent=2)


def table(found: list[RunRow]) -> Table:
    shown = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for column in ("run", "state", "step", "folder", "reason"):
        shown.add_column(column, justify="right" if column == "step" else "left", overflow="fold")
    for row in found:
        step = "" if row.step is None else str(row.step)
        shown.add_row(row.run_id, row.state, step, row.folder, Text(printable(row.reason)))
    return shown
