"""`headrace status`: who runs, what they do, what waits, whether the balance closes, and what asks for attention."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from broker.api import OperatorPort, Peer, QueueDepths, RunState
from deploy.ages import age
from deploy.printable import printable
from deploy.report import balance_line, sheet_fields
from deploy.troubles import troubles

NEARLY_FULL = 0.9
"""Of its memory."""


async def gather(run_id: str, operator: OperatorPort) -> dict[str, Any]:
    """Everything, JSON-able."""
    state = await operator.state()
    peers = sorted(await operator.peers(), key=lambda peer: peer.name)
    depths = await operator.depths()
    used, limit = await operator.memory()
    return {
        "run": run_id,
        **asdict(state),
        "processes": [_process(asdict(peer), state.step) for peer in peers],
        "queues": asdict(depths),
        "memory": {"used": used, "limit": limit},
        "balance": {sheet.kind: sheet_fields(sheet) for sheet in await operator.balance()},
        "notes": [*notes(state, peers, depths, time.time()), *memory_notes(used, limit)],
    }


def notes(state: RunState, peers: list[Peer], depths: QueueDepths, now: float) -> list[str]:
    """What a person should know or do, one sentence each. `now` is in seconds since the epoch."""
    alive = [peer for peer in peers if peer.alive]
    said = [(peer.name, trouble) for peer in alive for trouble in troubles(peer.state)]
    found = [f"{name}, for {age(max(0.0, now - trouble.since))}: {trouble.reason}" for name, trouble in said]
    roles = {peer.role for peer in alive} | {"producer" for _, trouble in said if trouble.kind == "producers"}
    if state.status == "running" and "producer" not in roles:
        found.append(
            "no producer plays: one that was just started loads first; `headrace scale producer N` starts more"
        )
    if state.status == "running" and "trainer" not in roles:
        found.append("no trainer is alive: until one has loaded, groups wait and nothing is trained")
    if depths.dead:
        found.append(f"{depths.dead} dead: see `headrace dead list`")
    return found


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
    reason = f" ({printable(status['reason'])})" if status["reason"] else ""
    console.print(f"run {status['run']}: {status['status']}{reason}, step {status['step']}", markup=False)
    console.print(_processes(status["processes"]))
    queues = status["queues"]
    console.print(
        f"tasks: {queues['tasks_waiting']} waiting, {queues['tasks_held']} held   "
        f"groups: {queues['groups_waiting']} waiting, {queues['groups_held']} held   dead: {queues['dead']}"
    )
    for kind, sheet in status["balance"].items():
        console.print(f"balance, {kind}: {balance_line(sheet)}")
        for reason, count in sorted(sheet["reasons"].items()):
            console.print(f"    {count} {printable(reason)}", markup=False)
    for note in status["notes"]:
        console.print(printable(note), style="yellow", markup=False)


def _processes(processes: list[dict[str, Any]]) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for column in ("process", "role", "host", "pid", "alive", "version", "lag", "tokens/s", "idle"):
        table.add_column(column, justify="right" if column in ("pid", "lag", "tokens/s", "idle") else "left")
    for peer in processes:
        said = peer["state"]
        cells = (
            peer["name"],
            peer["role"],
            peer["host"],
            str(peer["pid"]),
            "yes" if peer["alive"] else "no",
            str(said.get("version") or ""),
            "" if peer["lag"] is None else str(peer["lag"]),
            _figure(said.get("tokens_per_s"), ".0f"),
            _figure(said.get("idle"), ".0%"),
        )
        table.add_row(*(Text(printable(cell)) for cell in cells))
    return table


def _figure(value: Any, spec: str) -> str:
    return format(value, spec) if isinstance(value, int | float) else ""
