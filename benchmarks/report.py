"""What every benchmark prints, writes and checks: figures, each beside the baseline of the same run."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured claim. It holds when `ratio` (or, without a baseline, `value`) keeps to `bar`."""

    value: float
    unit: str
    baseline: float | None = None
    """The same work by the physical limit or by a peer, in the same unit and run."""
    ratio: float | None = None
    bar: float | None = None
    """The least that must be reached; None is reported only."""
    at_most: bool = False
    """The bar is the most that there may be."""

    @property
    def holds(self) -> bool | None:
        if self.bar is None:
            return None
        measured = self.value if self.ratio is None else self.ratio
        return measured <= self.bar if self.at_most else measured >= self.bar


def arguments(description: str) -> argparse.ArgumentParser:
    """A parser with the options that all benchmarks share: `--json FILE` and `--check`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--check", action="store_true", help="exit 1 when a bar is missed")
    return parser


def report(title: str, figures: Mapping[str, Figure], *, json_file: Path | None, check: bool) -> int:
    """Print the figures, write them, and return the exit code: 1 when `check` is set and a bar is missed."""
    table = Table(title=title)
    for heading in ("figure", "value", "baseline", "ratio", "bar", ""):
        table.add_column(heading, justify="left" if heading == "figure" else "right")
    for name, figure in figures.items():
        mark = {True: "holds", False: "MISSED", None: ""}[figure.holds]
        table.add_row(
            name,
            f"{figure.value:.4g} {figure.unit}".strip(),
            _number(figure.baseline),
            _number(figure.ratio),
            ("≤ " if figure.bar is not None and figure.at_most else "") + _number(figure.bar),
            mark,
        )
    Console().print(table)
    if json_file is not None:
        json_file.write_text(json.dumps({"figures": {name: _fields(one) for name, one in figures.items()}}, indent=2))
    return int(check and any(figure.holds is False for figure in figures.values()))


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _fields(figure: Figure) -> dict[str, float | str | bool | None]:
    return {
        "value": figure.value,
        "unit": figure.unit,
        "baseline": figure.baseline,
        "ratio": figure.ratio,
        "bar": figure.bar,
        "holds": figure.holds,
    }
