"""The table at the end of a run, from its summary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from broker.api import Balance
from deploy.printable import printable

_MOST_EXAMPLES = 4
_PROMPT_CHARACTERS = 72


def report(summary: dict[str, Any]) -> RenderableType:
    """Accuracy before and after, a few completions, where time went, balance, exported model.

    Parts that the summary does not have are left out.
    """
    parts = [part for part in (_figures(summary), _examples(summary), _stages(summary)) if part is not None]
    return Padding(Group(*parts), (1, 0, 0, 0))


def print_report(console: Console, summary: dict[str, Any]) -> None:
    console.print(report(summary), soft_wrap=False)


def _figures(summary: dict[str, Any]) -> RenderableType:
    table = Table(title="Result", title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    for label, key in (("held-out accuracy before", "accuracy_before"), ("held-out accuracy after", "accuracy_after")):
        if isinstance(summary.get(key), int | float):
            table.add_row(label, f"{summary[key]:.1%}")
    table.add_row("steps", str(summary.get("steps", "-")))
    if isinstance(summary.get("wall_s"), int | float):
        table.add_row("wall time", f"{summary['wall_s']:.0f} s")
    for kind, sheet in (summary.get("balance") or {}).items():
        table.add_row(f"balance, {kind}", balance_line(sheet))
    if summary.get("export"):
        table.add_row("exported model", Text(str(summary["export"]), overflow="fold"))
    return table


def sheet_fields(sheet: Balance) -> dict[str, Any]:
    """A balance sheet, JSON-able."""
    return {**asdict(sheet), "closed": sheet.closed}


def balance_line(sheet: dict[str, Any]) -> str:
    """ "320 admitted = 310 trained + 2 stale + 8 outstanding, closed"."""
    terms = [f"{count} {verdict}" for verdict, count in sorted((sheet.get("verdicts") or {}).items()) if count]
    terms.append(f"{sheet.get('outstanding', 0)} outstanding")
    closed = "closed" if sheet.get("closed") else "NOT CLOSED"
    return f"{sheet.get('admitted', 0)} admitted = {' + '.join(terms)}, {closed}"


def _examples(summary: dict[str, Any]) -> RenderableType | None:
    examples = (summary.get("examples") or [])[:_MOST_EXAMPLES]
    if not examples:
        return None
    table = Table(title="Completions", title_justify="left", box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("prompt", "before", "after"):
        table.add_column(column, overflow="fold", ratio=1)
    prompts = without_shared_lines([str(example.get("prompt", "")) for example in examples])
    for prompt, example in zip(prompts, examples, strict=True):
        before, after = (str(example.get(name, "")) for name in ("before", "after"))
        table.add_row(Text(last_part(prompt)), Text(one_line(before)), Text(one_line(after)))
    return table


def _stages(summary: dict[str, Any]) -> RenderableType | None:
    seconds: dict[str, dict[str, float]] = summary.get("seconds") or {}
    idle: dict[str, float] = summary.get("idle_wait") or {}
    if not seconds and not idle:
        return None
    table = Table(title="Where time went", title_justify="left", box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("stage")
    table.add_column("idle", justify="right")
    table.add_column("phases, share of its time", overflow="fold")
    for stage in sorted({*seconds, *idle}):
        phases = seconds.get(stage) or {}
        total = sum(phases.values())
        longest = sorted(phases.items(), key=lambda item: -item[1])
        shares = ", ".join(
            f"{phase} {spent / total:.0%}" for phase, spent in longest if total and spent / total >= 0.005
        )
        table.add_row(stage, f"{idle[stage]:.0%}" if isinstance(idle.get(stage), int | float) else "", shares)
    return table


def one_line(text: str) -> str:
    return printable(text.strip().replace("\n", "⏎"))


def without_shared_lines(prompts: Sequence[str]) -> list[str]:
    """The prompts without the lines that all of them have, such as those of one system message."""
    lines = [prompt.splitlines() for prompt in prompts]
    shared = set(lines[0]).intersection(*lines[1:]) if len(set(prompts)) > 1 else set()
    kept = ["\n".join(line for line in some if line not in shared) for some in lines]
    return [short or prompt for short, prompt in zip(kept, prompts, strict=True)]


def last_part(prompt: str) -> str:
    """The end of a prompt that is too long for a table."""
    line = one_line(prompt)
    return line if len(line) <= _PROMPT_CHARACTERS else f"…{line[-_PROMPT_CHARACTERS:]}"
