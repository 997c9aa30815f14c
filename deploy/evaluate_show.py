"""What `headrace evaluate` prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from deploy.evaluate import Found
from deploy.printable import printable
from headrace.words import counted


def show(found: Found, console: Console | None = None) -> None:
    console = console or Console(highlight=False, soft_wrap=True)
    said = found.as_json()
    asked = sum(found.prompts.values())
    console.print(
        Text(printable(f"{found.of}: {counted(asked, 'held-out prompt')}, {found.samples_per_prompt} samples each"))
    )
    console.print(_table(said))


def _table(said: Mapping[str, Any]) -> Table:
    """One row per environment, and one of all where there are several."""
    rows = [*said["environments"].items(), ("all", said)] if said["environments"] else [(*said["prompts"], said)]
    ks = list(said["pass_at"])
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("environment")
    for column in ("accuracy", *(f"pass@{k}" for k in ks if k != "1"), "samples", "without a sample"):
        table.add_column(column, justify="right")
    for name, row in rows:
        rates = [row["pass_at"].get(k) for k in ks if k != "1"]
        shown = [f"{row['accuracy']:.1%}", *("" if rate is None else f"{rate:.1%}" for rate in rates)]
        table.add_row(Text(printable(name)), *shown, str(row["samples"]), str(row["failed"]))
    return table
