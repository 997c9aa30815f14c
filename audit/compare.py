"""Two runs beside each other, on the four figures that decide. Pure but for what it prints with.

Whether the samples per device-hour differ at all is judged against the steps' own scatter: a difference of less than
two standard errors of the mean step time is none.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from audit.analysis import Audit
from audit.figures import Figures

Verdict = Literal["helped", "bought_with_staleness", "no_difference", "hurt", "fresher_but_slower"]
NOISE = 2.0
"""Standard errors within which two means are the same."""
LAG = 0.1
"""Steps of mean lag from which on two runs differ in staleness."""
SENTENCES: dict[Verdict, str] = {
    "helped": "the change helped: more samples per device-hour, and no more staleness",
    "bought_with_staleness": "the change bought throughput with staleness: compare the rewards before keeping it",
    "no_difference": "the change made no difference beyond the scatter of the steps",
    "hurt": "the change hurt: fewer samples per device-hour",
    "fresher_but_slower": "the change paid throughput for freshness: fewer samples per device-hour, and less staleness",
}


@dataclass(frozen=True, slots=True)
class Row:
    figure: str
    before: float | None
    after: float | None
    unit: str


@dataclass(frozen=True, slots=True)
class Comparison:
    before: str
    after: str
    verdict: Verdict
    sentence: str
    gain: float | None
    """Samples per device-hour of the second run over those of the first; None where that one consumed none."""
    noise: float | None
    """Relative difference that the scatter of the steps explains; None where there are too few to tell."""
    rows: tuple[Row, ...]


def compare(before: Audit, after: Audit) -> Comparison:
    a, b = before.figures, after.figures
    gain = b.consumed_per_device_hour / a.consumed_per_device_hour if a.consumed_per_device_hour else None
    errors = _error(a.step_s), _error(b.step_s)
    noise = None if errors[0] is None or errors[1] is None else NOISE * math.hypot(errors[0], errors[1])
    verdict = _verdict(gain, noise, b.mean_lag - a.mean_lag)
    return Comparison(before.run.run_id, after.run.run_id, verdict, SENTENCES[verdict], gain, noise, tuple(_rows(a, b)))


def _verdict(gain: float | None, noise: float | None, staler: float) -> Verdict:
    if gain is None or noise is None or abs(gain - 1) <= noise:
        return "no_difference"
    if gain > 1:
        return "bought_with_staleness" if staler > LAG else "helped"
    return "fresher_but_slower" if staler < -LAG else "hurt"


def _error(seconds: Sequence[float]) -> float | None:
    """Relative standard error of the mean; None of a single step, which may be anything."""
    if len(seconds) < 2:
        return None
    return statistics.stdev(seconds) / math.sqrt(len(seconds)) / statistics.fmean(seconds)


def _rows(a: Figures, b: Figures) -> list[Row]:
    latency, later = (figures.sync_latency_s.median if figures.sync_latency_s else None for figures in (a, b))
    stages = [stage for stage in a.idle_wait if stage in b.idle_wait]
    return [
        Row("samples per device-hour", a.consumed_per_device_hour, b.consumed_per_device_hour, ""),
        *(Row(f"idle-wait, {stage}", a.idle_wait[stage], b.idle_wait[stage], "%") for stage in stages),
        Row("weight-sync latency, median", latency, later, "s"),
        Row("staleness, mean lag", a.mean_lag, b.mean_lag, "steps"),
    ]


def shown(comparison: Comparison) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("figure")
    for column in (comparison.before, comparison.after, "change"):
        table.add_column(column, justify="right")
    for row in comparison.rows:
        table.add_row(row.figure, _cell(row.before, row.unit), _cell(row.after, row.unit), _change(row))
    scatter = "too few steps to tell" if comparison.noise is None else f"their scatter explains {comparison.noise:.1%}"
    return Group(Text(f"{comparison.sentence} ({scatter})", style="bold"), Text(""), table)


def _cell(value: float | None, unit: str) -> str:
    if value is None:
        return "not recorded"
    return f"{value:.1%}" if unit == "%" else f"{value:.3g} {unit}".strip() if unit else f"{value:.0f}"


def _change(row: Row) -> str:
    if row.before is None or row.after is None:
        return ""
    if row.unit == "%":
        return f"{100 * (row.after - row.before):+.1f} points"
    return f"{row.after / row.before - 1:+.1%}" if row.before else f"{row.after:+.3g}"
