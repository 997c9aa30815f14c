"""A record of portability, and the comparison of two, on a terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from audit.portability_compare import Comparison, Gap
from audit.portability_record import Rate, Record
from producers.engines.traits import Trait


def measured(record: Record) -> RenderableType:
    """What the engine has, then its rates."""
    traits = record.traits
    answers = _plain()
    for name, trait in (
        ("native backend", traits.native_backend),
        ("attention kernel", traits.attention_kernel),
        ("paged cache", traits.paged_cache),
    ):
        answers.add_row(name, _yes(trait), Text(trait.what))
    columns = ("completion", "batch", "tokens/s", "one request", "first part", "last part", "kept", "in flight")
    rates = _table(*columns)
    for rate in record.sustained:
        alone = record.alone(rate.completion_tokens)
        rates.add_row(
            f"{rate.completion_tokens} tokens",
            str(rate.batch),
            f"{rate.tokens_per_s:,.1f}",
            f"{alone.tokens_per_s:,.1f}" if alone else "",
            f"{rate.first:,.1f}",
            f"{rate.last:,.1f}",
            kept(rate),
            f"{rate.in_flight:.1f}",
        )
    head = f"{record.label}: {record.model}, prompts of {record.prompt_tokens} tokens"
    return Group(Text(head, style="bold"), Text(traits.software, style="dim"), answers, Text(""), rates)


def kept(rate: Rate) -> str:
    """ "97%", or why it cannot be told."""
    return "parts too short" if rate.kept is None else f"{rate.kept:.0%}"


def compared(comparison: Comparison) -> RenderableType:
    """The five questions, then every gap."""
    table = _table("question", f"baseline: {comparison.baseline}", f"candidate: {comparison.candidate}", "finding")
    for row in comparison.rows:
        table.add_row(*(Text(cell) for cell in (row.question, row.baseline, row.candidate, row.finding)))
    parts: list[RenderableType] = [table, Text(""), _gaps(comparison)]
    if comparison.even_price is not None:
        price = f"at {comparison.even_price:.4g} an hour the candidate's tokens would cost what the baseline's do"
        parts += [Text(""), Text(f"{price}, at batch {comparison.real.batch}")]
    parts += [Text(f"note: {note}", style="dim") for note in comparison.notes]
    return Group(*parts)


def _gaps(comparison: Comparison) -> Table:
    priced = any(gap.price.baseline is not None or gap.price.candidate is not None for gap in comparison.gaps)
    columns = ["completion", "batch", "baseline tokens/s", "candidate tokens/s", "gap", "one request", "first", "last"]
    table = _table(*columns, *(["baseline price", "candidate price"] if priced else []))
    for gap in comparison.gaps:
        table.add_row(*_cells(gap), *([_price(gap.price.baseline), _price(gap.price.candidate)] if priced else []))
    table.caption = "gap: the candidate's tokens/s over the baseline's" + (
        "; prices per million tokens" if priced else ""
    )
    table.caption_justify = "left"
    return table


def _cells(gap: Gap) -> list[str]:
    def ratio(value: float | None) -> str:
        return "unknown" if value is None else f"{value:.2f}"

    rates = [f"{gap.baseline:,.1f}", f"{gap.candidate:,.1f}"]
    ratios = [ratio(value) for value in (gap.ratio, gap.single, gap.first, gap.last)]
    return [f"{gap.completion_tokens} tokens", str(gap.batch), *rates, *ratios]


def _price(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _yes(trait: Trait) -> str:
    return "unknown" if trait.has is None else "yes" if trait.has else "no"


def _plain() -> Table:
    return Table(show_header=False, box=None, padding=(0, 2, 0, 0))


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        table.add_column(Text(column), overflow="fold")
    return table
