"""An audit as one HTML file: no script, no font and no picture from elsewhere, readable on a phone."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from html import escape
from itertools import pairwise
from typing import TypeVar

from audit import svg
from audit.analysis import Audit
from audit.figures import HOUR, STAGES, merged, stage_seconds
from audit.records import IDLE_PREFIX, Lane, Run
from audit.sharing import device_seconds
from audit.text import INTENSITY, duration, hours, intensity_rows, processor_time, rows

BINS = 60
"""Of idle waits over time."""
MOST_POINTS = 500
"""Of one plot."""
MOST_LANES = 60
"""Lanes that are drawn; of more, the rest is one bar."""

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1c; --dim: #666; --line: #ddd; --paper: #fff; --note: #f3f6fa }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8e8e8; --dim: #a0a0a0; --line: #3a3a3a; --paper: #161616; --note: #20252b }
}
* { box-sizing: border-box }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 0 auto;
  padding: 1rem; max-width: 72rem; overflow-wrap: anywhere }
h1 { font-size: 1.4rem; margin: 0 } h2 { font-size: 1.1rem; margin: 0 0 .4rem }
.dim, figcaption { color: var(--dim); font-size: .9rem } code { font-size: .9em }
.verdict { background: var(--note); border-left: 4px solid #0072b2; padding: .8rem 1rem; margin: 1rem 0 }
.verdict strong { font-size: 1.1rem } .verdict ul { margin: .4rem 0 0; padding-left: 1.2rem }
main { display: grid; gap: 1.6rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 25rem), 1fr)) }
section { min-width: 0 } .wide { grid-column: 1 / -1 } figure { margin: 0 }
svg { width: 100%; max-width: 34rem; height: auto; display: block }
.pair { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 25rem), 1fr)) }
svg text { font-size: 11px; fill: var(--ink) }
svg .grid { stroke: var(--line) }
.legend { display: flex; flex-wrap: wrap; gap: .2rem .9rem; font-size: .85rem; margin: .4rem 0 }
.legend i { display: inline-block; width: .8em; height: .8em; margin-right: .35em; border-radius: 2px }
table { border-collapse: collapse; width: 100%; font-size: .93rem }
th, td { text-align: left; padding: .3rem .6rem .3rem 0; border-bottom: 1px solid var(--line); vertical-align: top }
th { color: var(--dim); font-weight: 500 } table.stack td:first-child { overflow-wrap: normal; min-width: 6rem }
table.stack td:nth-child(2) { white-space: nowrap }
@media (max-width: 40rem) {
  table.stack thead { display: none }
  table.stack tr { display: block; padding: .5rem 0; border-bottom: 1px solid var(--line) }
  table.stack td { display: block; border: 0; padding: .05rem 0 }
  table.stack td::before { content: attr(data-name) ": "; color: var(--dim) }
}
"""


def page(audit: Audit) -> str:
    """The whole file."""
    run, figures = audit.run, audit.figures
    name = escape(run.run_id)
    told = "".join(f"<li>{escape(line)}</li>" for line in audit.bottleneck.evidence)
    head = (
        f"<h1>{name}</h1><p class='dim'>{figures.steps} steps in {duration(figures.wall_s)}, "
        f"{hours(figures.device_hours)} device-hours</p>"
        f"<div class='verdict'><strong>{escape(_capital(audit.bottleneck.sentence))}.</strong><ul>{told}</ul></div>"
    )
    sections = "".join(section for part in _PARTS if (section := part(audit)))
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>Audit of {name}</title><style>{_STYLE}</style></head>"
        f"<body><header>{head}</header><main>{sections}</main></body></html>\n"
    )


def _levers(audit: Audit) -> str:
    cells = [(lever.name.replace("_", " "), f"x {lever.gain:.2f}", lever.why, lever.how) for lever in audit.levers]
    if not cells:
        return ""
    told = "gain: samples per device-hour afterwards over those of now"
    return _section("What to change next", _table(("lever", "gain at most", "why", "how"), cells), told, wide=True)


def _split(audit: Audit) -> str:
    split = audit.split
    if split is None:
        return ""
    cells = [
        (
            f"{choice.producers}{' (now)' if choice.producers == split.now.producers else ''}"
            f"{' (recommended)' if choice.producers == split.recommended.producers else ''}",
            f"{choice.samples_per_s:.2f}",
            f"{choice.samples_per_device_hour:.0f}",
            f"{choice.trainer_idle:.0%}",
            f"{choice.producer_idle:.0%}",
        )
        for choice in split.table
    ]
    names = ("producers", "samples/s", "per device-hour", "trainer idle", "they idle")
    return _section("Producers that the measured rates call for", _table(names, cells))


def _figures(audit: Audit) -> str:
    body = "".join(f"<tr><th>{escape(label)}</th><td>{escape(value)}</td></tr>" for label, value in rows(audit))
    return _section("Figures", f"<table>{body}</table>")


def _signs(audit: Audit) -> str:
    seen = {None: "not recorded", True: "yes", False: "no"}
    cells = [(sign.name, seen[sign.seen], sign.evidence) for sign in audit.signs]
    return _section(
        "Signs that kernels are not what to tune next", _table(("sign", "seen", "evidence"), cells), wide=True
    )


def _intensity(audit: Audit) -> str:
    if not audit.uses:
        return ""
    body = _table(INTENSITY, intensity_rows(audit))
    return _section("Intensity, beside how long it took", body, processor_time(audit), wide=True)


def _lanes(audit: Audit) -> str:
    estimated = audit.run.estimated
    lanes = [(_called(lane, estimated), lane.seconds()) for lane in audit.run.lanes if lane.pieces]
    lanes.sort(key=lambda lane: lane[0])
    shown, rest = lanes[:MOST_LANES], [phases for _, phases in lanes[MOST_LANES:]]
    if rest:
        mean = {phase: spent / len(rest) for phase, spent in merged(rest).items()}
        shown.append((f"{len(rest)} more lanes, their mean", mean))
    phases = dict.fromkeys(phase for _, each in shown for phase in each)
    drawn = svg.bars(shown, "s", "Seconds of each lane by phase")
    return _section("Phases of each lane", drawn + svg.legend(phases), "from its first record to its last", wide=True)


def _called(lane: Lane, estimated: Container[tuple[str, str]]) -> str:
    mark = " (phases estimated)" if (lane.service, lane.name) in estimated else ""
    return f"{lane.service}, {lane.name}{mark}"


def _path(audit: Audit) -> str:
    if not audit.path:
        return ""
    spent: dict[str, float] = {}
    for segment in audit.path:
        spent[segment.phase] = spent.get(segment.phase, 0.0) + segment.seconds
    drawn = svg.bars([("from the first batch to the last step", spent)], "s", "Seconds of the critical path by phase")
    told = "what the run waited for, back from its last step; everything else was hidden behind it"
    return _section("Critical path", drawn + svg.legend(spent), told, wide=True)


def _idle(audit: Audit) -> str:
    found = "".join(
        _idle_of(audit.run, role, stage) for role, stage in STAGES.items() if role in ("producer", "trainer")
    )
    return _section("Idle by reason over time", f"<div class='pair'>{found}</div>", wide=True) if found else ""


def _idle_of(run: Run, role: str, stage: str) -> str:
    lanes = [lane for lane in run.of(role) if lane.pieces]
    if not lanes:
        return ""
    begin = min(lane.pieces[0].begin for lane in lanes)
    end = max(lane.pieces[-1].end for lane in lanes)
    edges = [begin + (end - begin) * place / BINS for place in range(BINS + 1)]
    bins = [stage_seconds(run, role, first, last) for first, last in pairwise(edges)]
    reasons = dict.fromkeys(phase for each in bins for phase in each if phase.startswith(IDLE_PREFIX))
    if not reasons:
        return ""
    series = {reason: [each.get(reason, 0.0) / (sum(each.values()) or 1.0) for each in bins] for reason in reasons}
    drawn = svg.areas([edge - begin for edge in edges], series, "seconds", f"Share of idle time of {stage} by reason")
    return f"<figure><figcaption>{escape(_capital(stage))}</figcaption>{drawn}{svg.legend(reasons)}</figure>"


def _lag(audit: Audit) -> str:
    if not audit.figures.lag:
        return ""
    drawn = svg.histogram(audit.figures.lag, "steps behind", "Groups by lag")
    return _section("Lag of what was trained on", drawn, f"groups; staleness.max_lag is {audit.run.max_lag}")


def _latency(audit: Audit) -> str:
    swaps = sorted(audit.run.swaps, key=lambda swap: swap.end)
    if not swaps:
        return ""
    values = [(swap.end - swaps[0].end, swap.latency_s) for swap in thinned(swaps)]
    drawn = svg.points(values, "seconds since the first", "seconds", "Weight-sync latency of each swap")
    return _section("Weight-sync latency", drawn, "from a version's seal to an engine's first token on it")


def _reward(audit: Audit) -> str:
    steps = thinned([step for step in audit.run.steps if step.reward is not None])
    values, spent, since = [], 0.0, float("-inf")
    for step in steps:
        spent += sum(sum(each.values()) for _, each in device_seconds(audit.run.lanes, since, step.end)) / HOUR
        values.append((spent, float(step.reward or 0.0)))
        since = step.end
    if len(values) < 2:
        return ""
    drawn = svg.points(values, "device-hours", "reward", "Reward of each step against device-hours", joined=True)
    return _section("Reward against device-hours", drawn)


Item = TypeVar("Item")


def thinned(items: Sequence[Item]) -> Sequence[Item]:
    """At most `MOST_POINTS` of them, evenly, the last one included."""
    every = -(-len(items) // MOST_POINTS)
    return items if every <= 1 else [*items[:-1:every], items[-1]]


_PARTS: Sequence[Callable[[Audit], str]] = (
    _levers, _path, _figures, _split, _lanes, _idle, _lag, _latency, _reward, _intensity, _signs,
)  # fmt: skip


def _section(title: str, body: str, told: str = "", *, wide: bool = False) -> str:
    dim = f"<p class='dim'>{escape(told)}</p>" if told else ""
    return f"<section{' class=wide' if wide else ''}><h2>{escape(title)}</h2>{dim}{body}</section>"


def _table(names: Sequence[str], cells: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join(
        "<tr>"
        + "".join(
            f'<td data-name="{escape(name, quote=True)}">{escape(cell)}</td>'
            for name, cell in zip(names, row, strict=True)
        )
        + "</tr>"
        for row in cells
    )
    return f"<table class='stack'><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
