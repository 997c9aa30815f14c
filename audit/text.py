"""An audit on a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from audit.analysis import Audit
from audit.figures import Figures, Spread
from audit.intensity import GPU
from audit.levers import Sign
from audit.split import Split

_SHOWN = 0.001
"""Share of the device-hours below which a phase is left out."""


def report(audit: Audit) -> RenderableType:
    """The bottleneck first, then what to change, then the figures that it comes from."""
    figures = audit.figures
    head = Text(
        f"run {audit.run.run_id}: {figures.steps} steps, {duration(figures.wall_s)}, "
        f"{hours(figures.device_hours)} device-hours"
    )
    verdict = Text(audit.bottleneck.sentence, style="bold")
    evidence = [Padding(Text(f"- {line}"), (0, 0, 0, 2)) for line in audit.bottleneck.evidence]
    parts: list[RenderableType] = [head, Text(""), verdict, *evidence]
    if audit.levers:
        parts += [Text(""), levers(audit)]
    if audit.split is not None:
        parts += [Text(""), splits(audit.split, audit.rates.devices[1])]
    parts += [Text(""), device_hours(figures), Text(""), summary(audit)]
    if audit.run.estimated:
        lanes = ", ".join(f"{service} {lane}" for service, lane in sorted(audit.run.estimated))
        parts.append(Text(f"the split into phases is estimated for: {lanes}", style="dim"))
    if audit.uses:
        parts += [Text(""), intensity(audit)]
    parts += [Text(""), signs(audit.signs)]
    return Group(*parts)


def levers(audit: Audit) -> Table:
    table = _table("What to change next", "lever", "gain at most", "why", "how")
    table.caption = "gain: samples per device-hour afterwards over those of now"
    table.caption_justify = "left"
    for lever in audit.levers:
        table.add_row(lever.name, f"x {lever.gain:.2f}", lever.why, Text(lever.how))
    return table


def splits(split: Split, trainers: int) -> Table:
    table = _table(
        "Producers that the measured rates call for",
        "producers",
        "samples/s",
        "per device-hour",
        "trainer idle",
        "they idle",
    )
    for choice in split.table:
        marks = [
            mark
            for mark, count in (("now", split.now.producers), ("recommended", split.recommended.producers))
            if choice.producers == count
        ]
        table.add_row(
            f"{choice.producers} {'(' + ', '.join(marks) + ')' if marks else ''}".strip(),
            f"{choice.samples_per_s:.2f}",
            f"{choice.samples_per_device_hour:.0f}",
            f"{choice.trainer_idle:.0%}",
            f"{choice.producer_idle:.0%}",
        )
    table.caption = f"for {trainers} trainer device{'s' * (trainers != 1)}, if nothing but devices is in the way"
    if split.recommended.producers != split.now.producers:
        gain = f"{split.gain:.2f} times the samples/s of {split.now.producers}"
        table.caption += f": {split.recommended.producers} would make {gain}"
    table.caption_justify = "left"
    return table


def device_hours(figures: Figures) -> Table:
    table = _table("Where the device-hours went", "stage", "idle", "phases, share of the stage")
    for stage, phases in figures.device_hours_by_phase.items():
        total = sum(phases.values())
        table.add_row(f"{stage} {hours(total)}", _share(figures.idle_wait.get(stage)), ", ".join(_shares(phases)))
    return table


def summary(audit: Audit) -> Table:
    """The figures that decide, and what else was counted."""
    table = Table(title="Figures", title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    for label, value in rows(audit):
        table.add_row(label, value)
    return table


def rows(audit: Audit) -> Iterator[tuple[str, str]]:
    """Label and value of each figure."""
    figures = audit.figures
    yield "device-hours of the whole run", hours(figures.device_hours)
    yield "samples consumed per device-hour", f"{figures.consumed_per_device_hour:.0f}"
    yield "samples generated per device-hour", f"{figures.generated_per_device_hour:.0f}"
    for stage, share in figures.idle_wait.items():
        yield f"idle-wait, {stage.replace('_', ' ')}", f"{share:.1%}"
    yield "weight-sync latency, seal to first token", spread(figures.sync_latency_s)
    yield "publish, what the trainer waits", spread(figures.publish_s)
    yield "transfer", spread(figures.transfer_s)
    yield "swap, what decoding stands still", spread(figures.swap_s)
    yield "a group's publish to its batch", spread(figures.consume_s)
    yield "lag, mean", f"{figures.mean_lag:.2f} steps"
    yield "dropped", f"{figures.dropped_groups} groups, {hours(figures.dropped_device_hours)} device-hours"
    yield "perfect overlapping would save", f"{duration(audit.overlap_s)} of {duration(figures.window_s)}"
    if figures.lost_s >= 0.05:
        yield "not recorded by killed processes", f"{figures.lost_s:.1f} lane-seconds"


INTENSITY = ("phase", "seconds", "GFLOP/s", "of the measured", "GB/s", "of the measured")


def intensity(audit: Audit) -> Table:
    table = _table("Intensity, beside how long it took", *INTENSITY)
    for row in intensity_rows(audit):
        table.add_row(*row)
    table.caption = processor_time(audit)
    table.caption_justify = "left"
    return table


def intensity_rows(audit: Audit) -> list[tuple[str, ...]]:
    """A phase each, with the columns of `INTENSITY`."""

    def part(share: float | None) -> str:
        return "not measured" if share is None else f"{share:.0%}"

    return [
        (
            use.phase,
            f"{use.seconds:.1f}",
            f"{use.flop_per_s / 1e9:.3g}",
            part(use.of_flop),
            f"{use.bytes_per_s / 1e9:.3g}",
            part(use.of_bytes),
        )
        for use in audit.uses
    ]


def processor_time(audit: Audit) -> str:
    """Of each service; and its GPU, where it has one."""
    said = []
    for process in audit.processes:
        gpu = "".join(f", {GPU[name]} {value:.0%}" for name, value in process.gpu.items())
        said.append(f"{process.service} {process.cpu:.2f}{gpu}")
    return f"processor seconds per second: {'; '.join(said)}"


def signs(found: tuple[Sign, ...]) -> Table:
    table = _table("Signs that kernels are not what to tune next", "sign", "seen", "evidence")
    for sign in found:
        table.add_row(sign.name, "not recorded" if sign.seen is None else "yes" if sign.seen else "no", sign.evidence)
    return table


def hours(value: float) -> str:
    """With as many digits as say something."""
    return f"{value:.2f}" if value >= 1 else f"{value:.4f}"


def duration(seconds: float) -> str:
    """ "12.3 s", "4 min 10 s", "3 h 5 min"."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def spread(value: Spread | None) -> str:
    if value is None:
        return "not recorded"
    return f"{value.median:.3f} s median, {value.p95:.3f} s p95, of {value.count}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _shares(phases: Mapping[str, float]) -> Iterator[str]:
    total = sum(phases.values())
    for phase, spent in sorted(phases.items(), key=lambda item: -item[1]):
        if total and spent >= _SHOWN * total:
            yield f"{phase} {spent / total:.1%}"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
