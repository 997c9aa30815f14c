"""`headrace status`: who runs, what they do, what waits, and whether the balance closes."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from broker.api import OperatorPort
from deploy.report import balance_line, sheet_fields


async def gather(run_id: str, operator: OperatorPort) -> dict[str, Any]:
    """Everything, JSON-able."""
    state = await operator.state()
    peers = await operator.peers()
    return {
        "run": run_id,
        **asdict(state),
        "processes": [_process(asdict(peer), state.step) for peer in sorted(peers, key=lambda peer: peer.name)],
        "queues": asdict(await operator.depths()),
        "balance": {sheet.kind: sheet_fields(sheet) for sheet in await operator.balance()},
    }


def _process(peer: dict[str, Any], step: int) -> dict[str, Any]:
    """A peer with its lag: trainer steps that its version is behind."""
    said = peer["state"]
    version = str(said.get("version") or "")
    own_step = version.partition(".")[2]
    lag = step - int(own_step) if peer["role"] == "producer" and own_step.isdigit() else None
    return {**peer, "lag": lag}


def show(console: Console, status: dict[str, Any]) -> None:
    reason = f" ({status['reason']})" if status["reason"] else ""
    console.print(f"run {status['run']}: {status['status']}{reason}, step {status['step']}")
    console.print(_processes(status["processes"]))
    queues = status["queues"]
    console.print(
        f"tasks: {queues['tasks_waiting']} waiting, {queues['tasks_held']} held   "
        f"groups: {queues['groups_waiting']} waiting, {queues['groups_held']} held   dead: {queues['dead']}"
    )
    for kind, sheet in status["balance"].items():
        console.print(f"balance, {kind}: {balance_line(sheet)}")
        for reason, count in sorted(sheet["reasons"].items()):
            console.print(f"    {count} {reason}")


def _processes(processes: list[dict[str, Any]]) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for column in ("process", "role", "host", "pid", "alive", "version", "lag", "tokens/s", "idle"):
        table.add_column(column, justify="right" if column in ("pid", "lag", "tokens/s", "idle") else "left")
    for peer in processes:
        said = peer["state"]
        table.add_row(
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
    return table


def _figure(value: Any, spec: str) -> str:
    return format(value, spec) if isinstance(value, int | float) else ""
