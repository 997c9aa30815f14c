"""The five questions, by hand."""

from __future__ import annotations

import io

import pytest
from rich.console import Console, RenderableType

from audit.portability_compare import compare, price
from audit.portability_record import Record
from audit.portability_text import compared, measured
from headrace.errors import ConfigError
from producers.engines.traits import Trait, Traits
from tests.portability import rate, record

FUSED = Traits("cuda", "x", Trait(True, "own"), Trait(True, "fa3"), Trait(True, "pages of 1 token"))


@pytest.fixture
def baseline() -> Record:
    single = [rate(64, 1, (100.0, 100.0)), rate(256, 1, (80.0, 80.0))]
    sustained = [rate(64, 8, (400.0, 400.0)), rate(64, 32, (1000.0, 1000.0)), rate(256, 32, (820.0, 780.0))]
    return record("base", single, sustained, traits=FUSED)


@pytest.fixture
def candidate() -> Record:
    single = [rate(64, 1, (90.0, 90.0)), rate(256, 1, (60.0, 60.0))]
    sustained = [rate(256, 32, (410.0, 312.0)), rate(64, 32, (500.0, 500.0)), rate(512, 64, (700.0, 700.0))]
    return record("port", single, sustained)


def test_the_gap_is_that_of_the_real_batch(baseline: Record, candidate: Record) -> None:
    found = compare(baseline, candidate)
    assert [(gap.completion_tokens, gap.batch) for gap in found.gaps] == [(64, 32), (256, 32)]
    real = found.real
    assert (real.completion_tokens, real.batch, real.baseline, real.candidate) == (256, 32, 800.0, 361.0)
    assert (real.ratio, real.single) == pytest.approx((361 / 800, 0.75))
    assert (real.first, real.last, real.hold) == (pytest.approx(0.5), pytest.approx(0.4), "falls")
    assert found.gaps[0].hold == "holds"


def test_the_five_questions_are_answered(baseline: Record, candidate: Record) -> None:
    backend, attention, gap, cache, held = compare(baseline, candidate).rows
    assert (backend.baseline, backend.candidate) == ("yes: own", "unknown: the engine does not tell")
    assert (backend.finding, attention.finding, cache.finding) == ("unknown", "the candidate lacks it", "both")
    assert gap.baseline == "800.0 tokens/s at batch 32; one request 80.0"
    assert gap.finding == "the candidate makes 0.45 times as many tokens/s; for one request 0.75 times"
    assert cache.candidate == "yes: pages of 32 tokens; batch 32 makes 6.02 times what one request does"
    assert held.candidate == "410.0 tokens/s at first, 312.0 at last, within 120 s: 76%"
    assert held.finding == "does not hold: the candidate loses ground (0.50 times at first, 0.40 at last)"


@pytest.mark.parametrize(
    ("last", "hold"), [(94.0, "falls"), (96.0, "holds"), (100.0, "holds"), (104.0, "holds"), (106.0, "rises")]
)
def test_a_gap_holds_within_five_per_cent(last: float, hold: str) -> None:
    before, after = (record("r", [], [rate(64, 8, (100.0, end))]) for end in (100.0, last))
    assert compare(before, after).real.hold == hold
    turned = {"falls": "rises", "rises": "falls", "holds": "holds"}
    assert compare(after, before).real.hold == turned[hold]


@pytest.mark.parametrize(
    ("parts", "hold"),
    [
        # Neighbours differ by 10 each, and so do first and last: 10 is not more than twice 10.
        ((100.0, 90.0, 100.0, 90.0, 100.0, 90.0), "scatters"),
        # It falls by 10 once: root mean square of the five differences 10 / sqrt(5) = 4.5.
        ((100.0, 100.0, 100.0, 90.0, 90.0, 90.0), "falls"),
        # By chance, up to 20 between neighbours, and by 10 from first to last.
        ((100.0, 80.0, 100.0, 85.0, 105.0, 110.0), "scatters"),
        ((100.0, 80.0, 100.0, 85.0, 95.0, 104.0), "holds"),
        ((100.0, 0.0, 0.0, 0.0, 0.0, 0.0), "falls"),
    ],
)
def test_a_change_counts_beyond_the_scatter(parts: tuple[float, ...], hold: str) -> None:
    before, after = (record("r", [], [rate(64, 8, each)]) for each in ((100.0, 100.0), parts))
    assert compare(before, after).real.hold == hold


def test_a_baseline_that_stood_still_tells_nothing() -> None:
    before, after = (record("r", [], [rate(64, 8, each)]) for each in ((9.0, 9.0, 0.0, 0.0, 9.0, 9.0), (9.0, 9.0)))
    assert compare(before, after).real.hold == "unknown"
    assert compare(after, before).real.hold == "holds"


def test_parts_shorter_than_a_completion_tell_nothing(baseline: Record) -> None:
    brief = record("brief", [], [rate(256, 32, (800.0, 100.0), completion_s=100.0)])
    real = compare(baseline, brief).real
    assert (real.first, real.last, real.hold, real.single) == (None, None, "unknown", None)
    assert compare(baseline, brief).rows[4].finding.startswith("cannot be told")


def test_tokens_have_a_price(baseline: Record, candidate: Record) -> None:
    # 3.60 an hour at 1,000 tokens/s are 3.6 million tokens.
    assert price(3.6, 1000.0) == pytest.approx(1.0)
    found = compare(baseline, candidate, 2.88, 1.0)
    assert found.real.price.baseline == pytest.approx(1.0)
    assert found.real.price.candidate == pytest.approx(1.0 / (361 * 3600) * 1e6)
    assert found.even_price == pytest.approx(2.88 * 361 / 800)
    assert compare(baseline, candidate, None, 1.0).even_price is None


def test_what_makes_a_comparison_worth_less_is_said(baseline: Record) -> None:
    assert compare(baseline, baseline).notes == ()
    brief = record("b", [], [rate(256, 32, (8.0, 8.0), seconds=5.0, mean_tokens=100.0)], model="other")
    assert compare(baseline, brief).notes == (
        "the models have different names: smollm2 and other",
        "the candidate was measured for 5 s only; sustained load is minutes",
        "completions of the candidate were shorter than asked: 100.0 tokens instead of 256",
    )


def test_records_with_nothing_in_common_are_refused(baseline: Record) -> None:
    with pytest.raises(ConfigError, match=r"no completion length and batch size in common.*512 tokens at batch 4;"):
        compare(baseline, record("r", [], [rate(512, 4, (1.0, 1.0))]))
    with pytest.raises(ConfigError, match="prompts of 64 tokens and the candidate with prompts of 16; measure both"):
        compare(baseline, record("r", [], [rate(64, 8, (1.0, 1.0))], prompt_tokens=16))


def text(shown: RenderableType) -> str:
    out = io.StringIO()
    Console(file=out, width=240).print(shown)
    return out.getvalue()


def test_both_are_shown(baseline: Record, candidate: Record) -> None:
    shown = text(compared(compare(baseline, candidate, 2.88, 1.0)))
    for part in ("baseline: base", "candidate: port", "Decode gap at real batch?", "0.45", "prices per million tokens"):
        assert part in shown
    assert "price" not in text(compared(compare(baseline, candidate)))
    record_shown = text(measured(baseline))
    assert [line.split() for line in record_shown.splitlines() if line.startswith("256 tokens")] == [
        ["256", "tokens", "32", "800.0", "80.0", "820.0", "780.0", "95%", "32.0"]
    ]
