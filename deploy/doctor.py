"""`headrace doctor`: what is asked of the broker and read from the journals, and how it is shown."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from audit.doctor import Finding, Progress, Seen, Standing, Wait, ago
from broker.connect import Run
from deploy.printable import printable

TAIL_BYTES = 1 << 18
"""Of the end of each journal: minutes of records."""
MOST_TASKS = 64


async def look(run_id: str, port: Run) -> Seen:
    """Ask once. Raises BrokerUnavailable, Refused."""
    record, asked = await port.record(), time.time()
    now = await port.now_ms() / 1000
    head = await port.head()
    config = record.config
    tails = {file.stem: list(tail(file)) for file in journals(record.folder)}
    return Seen(
        run=run_id,
        folder=record.folder,
        now=now,
        state=await port.state(),
        peers=tuple(await port.peers()),
        depths=await port.depths(),
        tasks=tuple(await port.oldest_tasks(MOST_TASKS)),
        memory=await port.memory(),
        refusal=await port.refusal(),
        max_lag=int(config.get("staleness", {}).get("max_lag", 0)),
        head=str(head) if head else "",
        unbalanced=tuple(sheet.kind for sheet in await port.balance() if not sheet.closed),
        skew_s=asked - now,
        lanes={key: standing for name, lines in tails.items() for key, standing in standings(name, lines)},
        progress={name: found for name, lines in tails.items() if (found := progress_of(lines)) is not None},
        offsets={name: offset for name, lines in tails.items() if (offset := offset_of(lines)) is not None},
    )


def journals(folder: str) -> list[Path]:
    """Of a run whose folder is on this machine."""
    return sorted(Path(folder).glob("*.jsonl")) if folder and Path(folder).is_dir() else []


def tail(file: Path) -> Iterator[dict[str, Any]]:
    """The newest lines of a journal."""
    with file.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size - TAIL_BYTES))
        rows = stream.read().split(b"\n")
    # The first is a part of one, the last one may be.
    for row in rows[1:] if size > TAIL_BYTES else rows:
        try:
            line = json.loads(row)
        except ValueError:
            continue
        if isinstance(line, dict):
            yield line


def standings(service: str, lines: list[dict[str, Any]]) -> Iterator[tuple[tuple[str, str], Standing]]:
    """Each lane of a service's newest process: its phase, and since when it has been in it without a break."""
    found: dict[str, Standing] = {}
    pids: dict[str, int] = {}
    offset = offset_of(lines) or 0.0
    for line in lines:
        if line.get("event") == "still":
            for lane in line.get("lanes") or ():
                if lane in found and pids[lane] == line["pid"]:
                    found[lane] = replace(found[lane], written=float(line["until"]) + offset)
        if line.get("event") != "spans" or not (line.get("spans") or line.get("sums")):
            continue
        lane, begin = str(line["lane"]), float(line["begin"]) + offset
        before = found.get(lane) if pids.get(lane) == line["pid"] else None
        found[lane], pids[lane] = _after(before, begin, line), line["pid"]
        if line.get("last"):
            del found[lane]
    for lane, standing in found.items():
        yield (service, lane), standing


def _after(before: Standing | None, begin: float, line: dict[str, Any]) -> Standing:
    spans = line.get("spans") or sorted(line["sums"].items(), key=lambda item: item[1])
    phase, since = (before.phase, before.since) if before is not None else ("", begin)
    for name, seconds in spans:
        if name != phase:
            phase, since = name, begin
        begin += float(seconds)
    return Standing(phase, since, begin)


def progress_of(lines: list[dict[str, Any]]) -> Progress | None:
    """Since when a producer's engine has counted no new token; None for another service."""
    states = [line for line in lines if line.get("event") == "state" and "decoded_tokens" in line]
    if not states:
        return None
    newest = states[-1]
    same = [state for state in states if state["decoded_tokens"] == newest["decoded_tokens"]]
    return Progress(float(same[0]["time"]) + (offset_of(lines) or 0.0), int(newest.get("busy_slots") or 0))


def offset_of(lines: list[dict[str, Any]]) -> float | None:
    """The newest reading of the broker's clock minus a service's."""
    readings = [float(line["offset_s"]) for line in lines if line.get("event") == "clock" and "offset_s" in line]
    return readings[-1] if readings else None


def show(console: Console, seen: Seen, waits: list[Wait], findings: list[Finding]) -> None:
    console.print(f"run {seen.run}: {seen.state.status}, step {seen.state.step}", markup=False)
    if waits:
        table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
        for column in ("who waits", "for", "on", "since", "ids"):
            table.add_column(column, overflow="fold")
        for wait in waits:
            since = "" if wait.for_s is None else f"{ago(wait.for_s)} ago"
            table.add_row(*map(printable, (wait.who, wait.what, wait.whom, since, "; ".join(wait.ids))))
        console.print(table)
    for finding in findings:
        colour = {"fault": "red", "slow": "yellow", "fine": "green"}[finding.grade]
        console.print(printable(f"{finding.grade}: {finding.sentence}"), style=colour, markup=False)
        console.print(f"    {printable(finding.command)}", markup=False)
    if not findings:
        console.print("nothing is wrong", style="green")


def as_json(seen: Seen, waits: list[Wait], findings: list[Finding]) -> dict[str, Any]:
    return {
        "run": seen.run,
        "status": seen.state.status,
        "step": seen.state.step,
        "waits": [asdict(wait) for wait in waits],
        "findings": [asdict(finding) for finding in findings],
    }
