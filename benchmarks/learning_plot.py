"""Reward against samples and against time, as one SVG file that needs no page around it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from html import escape

from audit.svg import HEIGHT, WIDTH, Line, lines
from benchmarks.learning_clock import Course

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00")
"""Of the values of max_lag, in order."""
GAP, TITLE, ROW = 16.0, 22.0, 18.0
STYLE = "text{font:11px sans-serif;fill:#333}.grid{stroke:#ddd}"


def plot(courses: Mapping[str, Sequence[Course]], samples: int) -> str:
    """Means over seeds, by the setting's name, "lag 4" or "lag 4, uncorrected"; a step has so many `samples`."""
    lags = list(dict.fromkeys(_lag(name) for name in courses))
    by_samples, by_time = {}, {}
    for name, some in courses.items():
        rewards = [statistics.fmean(values) for values in zip(*(course.rewards for course in some), strict=True)]
        times = [statistics.fmean(values) for values in zip(*(course.times for course in some), strict=True)]
        style = COLOURS[lags.index(_lag(name))], name != _lag(name)
        counts = [float(version * samples) for version in range(len(rewards))]
        by_samples[name] = Line(list(zip(counts, rewards, strict=True)), *style)
        by_time[name] = Line(list(zip(times, rewards, strict=True)), *style)
    panels = (
        ("After the same samples", lines(by_samples, "samples", "expected reward", "reward against samples")),
        ("After the same time", lines(by_time, "decode steps", "expected reward", "reward against time")),
    )
    width, height = 2 * WIDTH + GAP, TITLE + HEIGHT + 2 * ROW + 8
    parts = [f'<rect width="{width:g}" height="{height:g}" fill="#fff"/><style>{STYLE}</style>']
    for place, (title, drawn) in enumerate(panels):
        left = place * (WIDTH + GAP)
        parts.append(f'<text x="{left + WIDTH / 2:g}" y="15" text-anchor="middle">{title}</text>')
        box = f'<svg x="{left:g}" y="{TITLE:g}" width="{WIDTH:g}" height="{HEIGHT:g}" '
        parts.append(drawn.replace("<svg ", box, 1))
    parts += _legend(by_samples, lags, TITLE + HEIGHT + ROW)
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}">{"".join(parts)}</svg>\n'


def _legend(named: Mapping[str, Line], lags: Sequence[str], top: float) -> list[str]:
    """Those with correction above those without."""
    parts = []
    for name, line in named.items():
        left, y = 60 + 165 * lags.index(_lag(name)), top + (ROW if line.dashed else 0)
        dashes = ' stroke-dasharray="4 3"' if line.dashed else ""
        place = f'x1="{left}" x2="{left + 24}" y1="{y - 4:g}" y2="{y - 4:g}"'
        parts.append(f'<line {place} stroke="{line.colour}" stroke-width="2"{dashes}/>')
        parts.append(f'<text x="{left + 30}" y="{y:g}">{escape(name)}</text>')
    return parts


def _lag(name: str) -> str:
    return name.partition(",")[0]
