"""What `headrace up` shows: lines for steps and events, and on a terminal a live panel below them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from deploy.printable import printable

STYLES = {
    **dict.fromkeys(("died", "killed", "silent", "stuck", "away", "in trouble"), "red"),
    **dict.fromkeys(("replaced", "changed"), "yellow"),
    **dict.fromkeys(("joined", "back", "goes on"), "green"),
}


@dataclass(frozen=True, slots=True)
class PartView:
    """One process in the panel."""

    name: str
    pid: int | None
    state: str
    version: str = ""
    tokens_per_s: float | None = None
    idle: float | None = None
    restarts: int = 0


@dataclass(frozen=True, slots=True)
class RunView:
    """The run in the panel."""

    run_id: str
    state: str
    step: int
    steps: int
    parts: Sequence[PartView] = ()


class Screen:
    """Writes to one console. Its owner redraws it: a thread of its own would run beside the starts of children."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started = time.monotonic()
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None

    def __enter__(self) -> Screen:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def line(self, text: str, style: str = "") -> None:
        """One line above the panel."""
        self._console.print(Text(text, style=style), soft_wrap=True)

    def event(self, part: str, event: str, text: str) -> None:
        """Something happened to a part."""
        self.line(f"{part} {event}: {printable(text)}" if text else f"{part} {event}", STYLES.get(event, "dim"))

    def show(self, view: RunView) -> None:
        """Redraw the panel; nothing where there is none."""
        if self._live is not None:
            self._live.update(panel(view, time.monotonic() - self._started), refresh=True)


def panel(view: RunView, seconds: float) -> Group:
    """The panel: one line for the run, a bar, and a table of its processes."""
    minutes, rest = divmod(int(seconds), 60)
    head = Text.assemble(("run ", "dim"), (view.run_id, "bold"), f"  {view.state}  {minutes}:{rest:02d}")
    bar = ProgressBar(total=max(1, view.steps), completed=view.step, width=40)
    count = Text(f" step {view.step}/{view.steps}")
    line = Table.grid()
    line.add_row(bar, count)
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for column, justify in (("process", "left"), ("pid", "right"), ("state", "left"), ("version", "left")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for column in ("tokens/s", "idle", "restarts"):
        table.add_column(column, justify="right")
    for part in view.parts:
        table.add_row(
            part.name,
            str(part.pid or ""),
            part.state,
            part.version,
            "" if part.tokens_per_s is None else f"{part.tokens_per_s:.0f}",
            "" if part.idle is None else f"{part.idle:.0%}",
            str(part.restarts or ""),
        )
    return Group(head, line, table)
