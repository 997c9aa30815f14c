"""Plots as SVG, drawn for a phone's width: 360 units wide, which a page shows as wide as it is itself.

Every mark has a title, which browsers show beside the pointer; text is escaped, and takes its colour from the page.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 360.0, 200.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 40.0, 8.0, 10.0, 34.0
_BAR, _ROW = 13.0, 34.0

COLOURS: Mapping[str, str] = {
    "decode": "#0072b2",
    "prefill": "#56b4e9",
    "recompute": "#9fd0ee",
    "swap": "#cc79a7",
    "forward_backward": "#009e73",
    "optimizer": "#00694d",
    "reference_logprobs": "#6cc5a6",
    "proximal_logprobs": "#6cc5a6",
    "batch_assembly": "#a8ddcb",
    "report": "#c3c9a0",
    "bookkeeping": "#8f9a4a",
    "export": "#5d6b2f",
    "weight_publish": "#aa4499",
    "transfer": "#8a4fb0",
    "verify": "#b9a0d0",
    "checkpoint": "#e69f00",
    "score": "#d55e00",
    "play": "#7fb3d5",
    "held": "#806000",
    "lost": "#d02020",
    "hand_over": "#44aa99",
    "publish": "#88ccbb",
    "start": "#c8c8c8",
    "drain": "#d8c8c8",
    "exit": "#d8d8c8",
}
_WAITS = ("#8c8c8c", "#a0a0a0", "#6f6f6f", "#b4b4b4", "#595959", "#929cab", "#aba292")
_OTHERS = ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377")


def colour(name: str) -> str:
    """Of a phase; waits are grey, so that work stands out."""
    if name in COLOURS:
        return COLOURS[name]
    shades = _WAITS if name.startswith("wait_") else _OTHERS
    return shades[sum(name.encode()) % len(shades)]


def bars(rows: Sequence[tuple[str, Mapping[str, float]]], unit: str, label: str) -> str:
    """Each row a bar of parts, as wide as its share of the longest; its name stands above it."""
    longest = max((sum(parts.values()) for _, parts in rows), default=0.0) or 1.0
    marks = []
    for place, (name, parts) in enumerate(rows):
        top, total = place * _ROW, sum(parts.values())
        marks.append(_text(0, top + 11, f"{name}", "start"))
        marks.append(_text(WIDTH, top + 11, f"{total:.3g} {unit}", "end"))
        at = 0.0
        for part, value in sorted(parts.items(), key=lambda item: (item[0].startswith("wait_"), -item[1])):
            width = WIDTH * value / longest
            said = f"{name}: {part} {value:.3g} {unit}, {value / total:.1%}" if total else name
            marks.append(_rect(at, top + 15, width, _BAR, colour(part), said))
            at += width
    return _svg(marks, len(rows) * _ROW, label)


def legend(names: Iterable[str]) -> str:
    """What the colours are, as HTML."""
    shown = "".join(
        f'<span><i style="background:{colour(name)}"></i>{escape(name.replace("_", " "))}</span>' for name in names
    )
    return f'<p class="legend">{shown}</p>'


def areas(times: Sequence[float], series: Mapping[str, Sequence[float]], x_unit: str, label: str) -> str:
    """Shares from 0 to 1, one upon the other, over bins that begin at `times`; one more time ends the last bin."""
    x = _scale(times[0], times[-1], _LEFT, WIDTH - _RIGHT)
    y = _scale(0.0, 1.0, HEIGHT - _BOTTOM, _TOP)
    marks = _axes(_ticks(times[0], times[-1]), (0.0, 0.5, 1.0), x, y, x_unit, percent=True)
    below = [0.0] * (len(times) - 1)
    for name, values in series.items():
        above = [low + value for low, value in zip(below, values, strict=True)]
        for place, (low, high) in enumerate(zip(below, above, strict=True)):
            if high - low > 0.002:
                begin, end = x(times[place]), x(times[place + 1])
                said = f"{name}: {high - low:.0%} from {times[place]:.3g} to {times[place + 1]:.3g} {x_unit}"
                marks.append(_rect(begin, y(high), end - begin + 0.3, y(low) - y(high), colour(name), said))
        below = above
    return _svg(marks, HEIGHT, label)


def histogram(counts: Mapping[int, int], x_unit: str, label: str) -> str:
    """A column for each whole number from 0 to the largest."""
    largest, most = max(counts), max(counts.values())
    x = _scale(-0.5, largest + 0.5, _LEFT, WIDTH - _RIGHT)
    y = _scale(0.0, float(most), HEIGHT - _BOTTOM, _TOP)
    every = max(1, math.ceil((largest + 1) / 12))
    marks = _axes([float(n) for n in range(0, largest + 1, every)], _ticks(0.0, float(most), 4), x, y, x_unit)
    width = (x(1.0) - x(0.0)) * 0.8
    for number, count in sorted(counts.items()):
        top = y(float(count))
        said = f"{number} {x_unit}: {count}"
        marks.append(_rect(x(number) - width / 2, top, width, HEIGHT - _BOTTOM - top, COLOURS["decode"], said))
    return _svg(marks, HEIGHT, label)


def points(values: Sequence[tuple[float, float]], x_unit: str, y_unit: str, label: str, *, joined: bool = False) -> str:
    """Points, by a line where they are `joined`."""
    xs, ys = [x for x, _ in values], [y for _, y in values]
    low, high = min(0.0, *ys), max(0.0, *ys) or 1.0
    x = _scale(min(xs), max(xs), _LEFT, WIDTH - _RIGHT)
    y = _scale(low, high, HEIGHT - _BOTTOM, _TOP)
    marks = _axes(_ticks(min(xs), max(xs)), _ticks(low, high, 4), x, y, x_unit, y_unit)
    if joined:
        path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in values)
        marks.append(f'<polyline points="{path}" fill="none" stroke="{COLOURS["decode"]}" stroke-width="1.5"/>')
    for a, b in values:
        said = f"{a:.4g} {x_unit}: {b:.3g} {y_unit}"
        mark = f'<circle cx="{x(a):.1f}" cy="{y(b):.1f}" r="2.4" fill="{COLOURS["decode"]}">'
        marks.append(f"{mark}<title>{escape(said)}</title></circle>")
    return _svg(marks, HEIGHT, label)


@dataclass(frozen=True, slots=True)
class Line:
    """Points in the order of x."""

    points: Sequence[tuple[float, float]]
    colour: str
    dashed: bool = False


def lines(named: Mapping[str, Line], x_unit: str, y_unit: str, label: str) -> str:
    """Lines over one another; the later ones above."""
    xs, ys = ([point[axis] for line in named.values() for point in line.points] for axis in (0, 1))
    x = _scale(min(xs), max(xs), _LEFT, WIDTH - _RIGHT)
    y = _scale(min(0.0, *ys), max(0.0, *ys) or 1.0, HEIGHT - _BOTTOM, _TOP)
    marks = _axes(_ticks(min(xs), max(xs)), _ticks(min(0.0, *ys), max(0.0, *ys) or 1.0), x, y, x_unit, y_unit)
    for name, line in named.items():
        path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in line.points)
        dashes = ' stroke-dasharray="4 3"' if line.dashed else ""
        mark = f'<polyline points="{path}" fill="none" stroke="{line.colour}" stroke-width="1.5"{dashes}>'
        marks.append(f"{mark}<title>{escape(name)}</title></polyline>")
    return _svg(marks, HEIGHT, label)


class _scale:  # noqa: N801 - used as a function
    """From a range of values to a range of units; a range of one value is its middle."""

    def __init__(self, low: float, high: float, first: float, last: float) -> None:
        self._low, self._first = low, first
        self._slope = (last - first) / (high - low) if high > low else 0.0
        if not self._slope:
            self._first = (first + last) / 2

    def __call__(self, value: float) -> float:
        return self._first + (value - self._low) * self._slope


def _ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers between two, at most `most` and a few."""
    if high <= low:
        return [low]
    rough = (high - low) / most
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough)
    first = math.ceil(low / step - 1e-9)
    return [round(number * step, 12) for number in range(first, math.floor(high / step + 1e-9) + 1)]


def _axes(
    x_ticks: Sequence[float],
    y_ticks: Sequence[float],
    x: _scale,
    y: _scale,
    x_unit: str,
    y_unit: str = "",
    *,
    percent: bool = False,
) -> list[str]:
    bottom = HEIGHT - _BOTTOM
    marks = []
    for tick in y_ticks:
        at = y(tick)
        marks.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        marks.append(_text(_LEFT - 4, at + 4, f"{tick:.0%}" if percent else f"{tick:g}", "end"))
    marks += [_text(x(tick), bottom + 14, f"{tick:g}", "middle") for tick in x_ticks]
    units = x_unit if not y_unit else f"{x_unit}; upward: {y_unit}"
    marks.append(_text((_LEFT + WIDTH - _RIGHT) / 2, HEIGHT - 4, units, "middle"))
    return marks


def _rect(x: float, y: float, width: float, height: float, fill: str, said: str) -> str:
    shape = (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{max(0.0, width):.2f}" height="{max(0.0, height):.2f}" fill="{fill}">'
    )
    return f"{shape}<title>{escape(said)}</title></rect>"


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(marks: Sequence[str], height: float, label: str) -> str:
    head = f'<svg viewBox="0 0 {WIDTH:g} {height:g}" role="img" aria-label="{escape(label, quote=True)}">'
    return head + "".join(marks) + "</svg>"
