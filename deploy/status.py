"""`headrace status`: who runs, what they do, what waits, whether the balance closes, and what asks for attention."""

from __future__ import annotations

import time
from collections.abc import Iterator, Set
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from broker.api import OperatorPort, Peer, RunState
from broker.looks import QueueDepths
from consumers.evaluation import JOURNAL, results_in
from deploy.ages import age
from deploy.printable import printable
from deploy.report import balance_line, sheet_fields
from deploy.troubles import troubles
from headrace.words import counted

NEARLY_FULL = 0.9
"""Of its memory."""
MOST_COLUMNS = 1000
MOST_RESULTS = 4
"""Of evaluations, the newest."""


async def gather(run_id: str, operator: OperatorPort) -> dict[str, Any]:
    """Everything, JSON-able."""
    state = await operator.state()
    peers = sorted(await operator.peers(), key=lambda peer: peer.name)
    depths = await operator.depths()
    used, limit = await operator.memory()
    refusal = await operator.refusal()
    return {
        "run": run_id,
        **asdict(state),
        "status": status_of(state, peers, refusal),
        "refusal": refusal,
        "processes": [_process(asdict(peer), state.step) for peer in peers],
        "queues": asdict(depths),
        "memory": {"used": used, "limit": limit},
        "balance": {sheet.kind: sheet_fields(sheet) for sheet in await operator.balance()},
        "evaluations": evaluations(peers, (await operator.record()).folder),
        "notes": [*notes(state, peers, depths, time.time(), refusal), *memory_notes(used, limit)],
    }


def evaluations(peers: list[Peer], folder: str) -> dict[str, Any]:
    """The newest results and how far the one is that goes on, as the trainer says; without it, as its journal says."""
    for peer in peers:
        said = peer.state.get("evaluations")
        if peer.role == "trainer" and peer.alive and isinstance(said, dict):
            return said
    try:
        lines = (Path(folder) / JOURNAL).read_text(encoding="utf-8").splitlines() if folder else []
    except (OSError, ValueError):
        # On another machine, or there was none.
        lines = []
    return {"results": results_in(lines)[-MOST_RESULTS:]}


def status_of(state: RunState, peers: list[Peer], refusal: str) -> str:
    """That of the broker; "stopped" for a run that has not ended and of which nothing is alive."""
    if state.status in ("finished", "failed") or refusal or any(peer.alive for peer in peers):
        return state.status
    return "stopped"


def notes(state: RunState, peers: list[Peer], depths: QueueDepths, now: float, refusal: str) -> list[str]:
    """What a person should know or do, one sentence each. `now` is in seconds since the epoch."""
    alive = [peer for peer in peers if peer.alive]
    said = [(peer.name, trouble) for peer in alive for trouble in troubles(peer, peers)]
    found = [f"{name}, for {age(max(0.0, now - trouble.since))}: {trouble.reason}" for name, trouble in said]
    roles = {peer.role for peer in alive} | {"producer" for _, trouble in said if trouble.kind == "producers"}
    if refusal:
        found.append(f"{refusal}: no heartbeat passes, so that nobody can be seen; make room, and all go on")
    elif status_of(state, peers, refusal) == "stopped":
        found.append(
            "no service is alive: what was just started loads first; `headrace up --resume` goes on with the run, or "
            "its services do, started as before"
        )
    elif state.status == "running":
        found += _missing(roles)
    if depths.dead:
        found.append(f"{depths.dead} dead: see `headrace dead list`")
    return found


def _missing(roles: Set[str]) -> Iterator[str]:
    if "producer" not in roles:
        yield (
            "no producer plays: one that was just started loads first; `headrace scale producer N`, `python -m "
            "producers`, or in containers `docker compose up -d`, starts one"
        )
    if "trainer" not in roles:
        yield "no trainer is alive: until one has loaded, groups wait and nothing is trained"


def memory_notes(used: int, limit: int) -> list[str]:
    """Whether the broker is nearly full."""
    if not limit or used < NEARLY_FULL * limit:
        return []
    return [
        f"Redis uses {used >> 20} MiB of its maxmemory of {limit >> 20} MiB: when it is full, producers wait; "
        "raise it, or lower broker.retain_bytes of the next run"
    ]


def _process(peer: dict[str, Any], step: int) -> dict[str, Any]:
    """A peer with its lag: trainer steps that its version is behind."""
    said = peer["state"]
    version = str(said.get("version") or "")
    own_step = version.partition(".")[2]
    lag = step - int(own_step) if peer["role"] == "producer" and own_step.isdigit() else None
    return {**peer, "lag": lag}


def show(console: Console, status: dict[str, Any]) -> None:
    # The table is as wide as it is, also on a narrow terminal and in a pipe: a name that is cut names nothing.
    console.width = MOST_COLUMNS
    reason = f" ({printable(status['reason'])})" if status["reason"] else ""
    console.print(f"run {status['run']}: {status['status']}{reason}, step {status['step']}", markup=False)
    console.print(_processes(status["processes"], seen=not status["refusal"]))
    queues = status["queues"]
    console.print(
        f"tasks: {queues['tasks_waiting']} waiting, {queues['tasks_held']} held   "
        f"groups: {queues['groups_waiting']} waiting, {queues['groups_held']} held   dead: {queues['dead']}"
    )
    for kind, sheet in status["balance"].items():
        console.print(f"balance, {kind}: {balance_line(sheet)}")
        for reason, count in sorted(sheet["reasons"].items()):
            console.print(f"    {count} {printable(reason)}", markup=False)
    for line in evaluation_lines(status["evaluations"]):
        console.print(printable(line), markup=False)
    for note in status["notes"]:
        console.print(printable(note), style="yellow", markup=False)


def evaluation_lines(said: dict[str, Any]) -> Iterator[str]:
    """One line for each result, and one for the evaluation that goes on."""
    for result in said.get("results", ()):
        rates = ", ".join(f"pass@{k} {rate:.1%}" for k, rate in result["pass_at"].items() if k != "1")
        failed = f", {counted(result['failed'], 'prompt')} without a sample" if result["failed"] else ""
        yield (
            f"evaluation of {result['version']}: accuracy {result['accuracy']:.1%}{rates and f', {rates}'} "
            f"({result['samples']} samples{failed})"
        )
        for name, part in result["environments"].items():
            yield f"    {name}: accuracy {part['accuracy']:.1%} ({part['samples']} samples)"
    if going := said.get("going"):
        answered = going["prompts"] - going["missing"]
        yield f"evaluation of {going['version']} goes on: {answered} of {going['prompts']} prompts answered"


def _processes(processes: list[dict[str, Any]], *, seen: bool) -> Table:
    """`seen` says whether heartbeats tell who is alive."""
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for column in ("process", "role", "host", "pid", "alive", "version", "transport", "lag", "tokens/s", "idle"):
        table.add_column(column, justify="right" if column in ("pid", "lag", "tokens/s", "idle") else "left")
    for peer in processes:
        said = peer["state"]
        cells = (
            peer["name"],
            peer["role"],
            peer["host"],
            str(peer["pid"]),
            "yes" if peer["alive"] else "no" if seen else "?",
            str(said.get("version") or ""),
            # What a weight service says is how it serves other hosts.
            str(said.get("transport") or "") if peer["role"] == "producer" else "",
            "" if peer["lag"] is None else str(peer["lag"]),
            _figure(said.get("tokens_per_s"), ".0f"),
            _figure(said.get("idle"), ".0%"),
        )
        table.add_row(*(Text(printable(cell)) for cell in cells))
    return table


def _figure(value: Any, spec: str) -> str:
    return format(value, spec) if isinstance(value, int | float) else ""
