"""Two records of `headrace portability measure` beside each other: five questions, with numbers. Pure.

A gap is the candidate's tokens per second over the baseline's, at the same completion length and batch size. The real
batch is the largest that both were measured at, with the longest completions of it. Whether a gap holds is judged
against the scatter of its parts, which is seen from how neighbours differ (von Neumann 1941, Annals of Mathematical
Statistics 12): that is small beside a change that lasts.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from audit.portability_record import Rate, Record
from headrace.errors import ConfigError
from producers.engines.traits import Trait

HOLDS = 0.05
"""Relative change of a gap, from the first part of the time to the last, within which it holds."""
NOISE = 2.0
"""A larger change counts from so many times the root mean square difference of neighbouring parts on."""
SUSTAINED_S = 60.0
"""Below this a measurement is for trying."""
MILLION = 1_000_000
HOUR_S = 3600.0

Hold = Literal["holds", "falls", "rises", "scatters", "unknown"]
SENTENCES: dict[Hold, str] = {
    "holds": "holds",
    "falls": "does not hold: the candidate loses ground",
    "rises": "does not hold: the candidate gains ground",
    "scatters": "cannot be told: its parts differ as much by chance; raise --seconds",
    "unknown": "cannot be told: the parts of a measurement must be longer than a completion takes; raise --seconds",
}


@dataclass(frozen=True, slots=True)
class Price:
    """Per million sampled tokens, in the currency of the hourly price; None without one."""

    baseline: float | None
    candidate: float | None


@dataclass(frozen=True, slots=True)
class Gap:
    """Of one completion length and batch size. Rates in tokens per second."""

    completion_tokens: int
    batch: int
    baseline: float
    candidate: float
    ratio: float
    single: float | None
    """The same ratio of one request alone; None where one of both lacks it."""
    first: float | None
    """Of the first part of the time; None where it cannot be told, as `last`."""
    last: float | None
    hold: Hold
    price: Price


@dataclass(frozen=True, slots=True)
class Row:
    """One question, the answer of each, and what follows."""

    question: str
    baseline: str
    candidate: str
    finding: str


@dataclass(frozen=True, slots=True)
class Comparison:
    baseline: str
    candidate: str
    rows: tuple[Row, ...]
    """The five questions, in order."""
    real: Gap
    """At the real batch."""
    gaps: tuple[Gap, ...]
    """All that both have, by completion length and batch size."""
    even_price: float | None
    """Hourly price of the candidate at which its tokens cost what the baseline's do at the real batch."""
    notes: tuple[str, ...]
    """What makes the comparison worth less."""


def compare(
    baseline: Record, candidate: Record, baseline_price: float | None = None, candidate_price: float | None = None
) -> Comparison:
    """Prices are per hour of all that each was measured on. Raises ConfigError for two that cannot be compared."""
    if baseline.prompt_tokens != candidate.prompt_tokens:
        raise ConfigError(
            f"the baseline was measured with prompts of {baseline.prompt_tokens} tokens and the candidate with prompts "
            f"of {candidate.prompt_tokens}; measure both with the same --prompt"
        )
    pairs = _pairs(baseline, candidate)
    gaps = tuple(_gap(baseline, candidate, *pair, baseline_price, candidate_price) for pair in pairs)
    place = max(range(len(gaps)), key=lambda one: (gaps[one].batch, gaps[one].completion_tokens))
    real, (one, other) = gaps[place], pairs[place]
    a, b = baseline.traits, candidate.traits
    rows = (
        _answers("Native backend?", a.native_backend, b.native_backend),
        _answers("Fused or paged attention kernel?", a.attention_kernel, b.attention_kernel),
        Row("Decode gap at real batch?", _rates(baseline, one), _rates(candidate, other), _size(real)),
        _cache(baseline, candidate, one, other),
        Row("Does the gap hold under sustained load?", _kept(one), _kept(other), _held(real)),
    )
    even = None if baseline_price is None else baseline_price * real.ratio
    return Comparison(baseline.label, candidate.label, rows, real, gaps, even, tuple(_notes(baseline, candidate)))


def price(hourly: float | None, tokens_per_s: float) -> float | None:
    """Per million tokens."""
    return None if hourly is None else hourly / (tokens_per_s * HOUR_S) * MILLION


def _pairs(baseline: Record, candidate: Record) -> list[tuple[Rate, Rate]]:
    theirs = {(rate.completion_tokens, rate.batch): rate for rate in candidate.sustained}
    ours = {(rate.completion_tokens, rate.batch): rate for rate in baseline.sustained}
    both = sorted(ours.keys() & theirs.keys())
    if not both:
        raise ConfigError(
            f"both have no completion length and batch size in common: the baseline has {_listed(baseline)}, the "
            f"candidate {_listed(candidate)}; measure both with the same --length and --batch"
        )
    return [(ours[key], theirs[key]) for key in both]


def _listed(record: Record) -> str:
    return ", ".join(f"{rate.completion_tokens} tokens at batch {rate.batch}" for rate in record.sustained)


def _gap(
    baseline: Record, candidate: Record, one: Rate, other: Rate, hourly: float | None, candidate_hourly: float | None
) -> Gap:
    alone, other_alone = (record.alone(one.completion_tokens) for record in (baseline, candidate))
    told = one.kept is not None and other.kept is not None and all(one.parts_tokens_per_s)
    both = zip(one.parts_tokens_per_s, other.parts_tokens_per_s, strict=True)
    ratios = [after / before for before, after in both] if told else []
    return Gap(
        completion_tokens=one.completion_tokens,
        batch=one.batch,
        baseline=one.tokens_per_s,
        candidate=other.tokens_per_s,
        ratio=other.tokens_per_s / one.tokens_per_s,
        single=other_alone.tokens_per_s / alone.tokens_per_s if alone and other_alone else None,
        first=ratios[0] if ratios else None,
        last=ratios[-1] if ratios else None,
        hold=_hold(ratios),
        price=Price(price(hourly, one.tokens_per_s), price(candidate_hourly, other.tokens_per_s)),
    )


def _hold(ratios: Sequence[float]) -> Hold:
    """Of the parts, in order; of none it is unknown."""
    if not ratios:
        return "unknown"
    change = ratios[-1] - ratios[0]
    if abs(change) <= HOLDS * ratios[0]:
        return "holds"
    noise = math.sqrt(statistics.fmean((after - before) ** 2 for before, after in itertools.pairwise(ratios)))
    if abs(change) <= NOISE * noise:
        return "scatters"
    return "falls" if change < 0 else "rises"


def _answers(question: str, one: Trait, other: Trait) -> Row:
    return Row(question, _answer(one), _answer(other), _finding(one, other))


def _answer(trait: Trait) -> str:
    said = "unknown" if trait.has is None else "yes" if trait.has else "no"
    return f"{said}: {trait.what}"


def _finding(one: Trait, other: Trait) -> str:
    if one.has is None or other.has is None:
        return "unknown"
    if one.has == other.has:
        return "both" if one.has else "neither"
    return "only the candidate" if other.has else "the candidate lacks it"


def _rates(record: Record, rate: Rate) -> str:
    alone = record.alone(rate.completion_tokens)
    single = f"; one request {alone.tokens_per_s:,.1f}" if alone else ""
    return f"{rate.tokens_per_s:,.1f} tokens/s at batch {rate.batch}{single}"


def _size(gap: Gap) -> str:
    single = "" if gap.single is None else f"; for one request {gap.single:.2f} times"
    return f"the candidate makes {gap.ratio:.2f} times as many tokens/s{single}"


def _cache(baseline: Record, candidate: Record, one: Rate, other: Rate) -> Row:
    """What the cache is, and what it shows in: how the rate grows with the batch."""
    a, b = baseline.traits.paged_cache, candidate.traits.paged_cache
    grown = _grown(baseline, one), _grown(candidate, other)
    said = [
        _answer(trait)
        + ("" if growth is None else f"; batch {one.batch} makes {growth:.2f} times what one request does")
        for trait, growth in zip((a, b), grown, strict=True)
    ]
    return Row("Cache management: paged?", said[0], said[1], _finding(a, b))


def _grown(record: Record, rate: Rate) -> float | None:
    alone = record.alone(rate.completion_tokens)
    return rate.tokens_per_s / alone.tokens_per_s if alone else None


def _kept(rate: Rate) -> str:
    over = f"{rate.first:,.1f} tokens/s at first, {rate.last:,.1f} at last, within {rate.seconds:.3g} s"
    return over if rate.kept is None else f"{over}: {rate.kept:.0%}"


def _held(gap: Gap) -> str:
    if gap.first is None or gap.last is None:
        return SENTENCES[gap.hold]
    return f"{SENTENCES[gap.hold]} ({gap.first:.2f} times at first, {gap.last:.2f} at last)"


def _notes(baseline: Record, candidate: Record) -> list[str]:
    notes = []
    if baseline.model != candidate.model:
        notes.append(f"the models have different names: {baseline.model} and {candidate.model}")
    for name, record in (("baseline", baseline), ("candidate", candidate)):
        shortest = min(rate.seconds for rate in record.sustained)
        if shortest < SUSTAINED_S:
            notes.append(f"the {name} was measured for {shortest:.3g} s only; sustained load is minutes")
        short = [rate for rate in record.sustained if rate.mean_tokens < 0.99 * rate.completion_tokens]
        if short:
            worst = min(short, key=lambda rate: rate.mean_tokens / rate.completion_tokens)
            notes.append(
                f"completions of the {name} were shorter than asked: {worst.mean_tokens:.1f} tokens instead of "
                f"{worst.completion_tokens}"
            )
    return notes
