"""Two runs beside each other: whether a change helped, and when that cannot be told."""

from __future__ import annotations

import io
import json
from dataclasses import asdict, replace

import pytest
from rich.console import Console

from audit.analysis import Audit, analyse, as_json
from audit.compare import compare, shown
from audit.page import page
from audit.text import report
from tests.audit.simulated import simulated


def audit(**plan: object) -> Audit:
    return analyse(simulated(**plan))


def test_a_faster_reward_helps() -> None:
    found = compare(audit(score_s=0.6, scorers=1), audit(score_s=0.1, scorers=1))
    assert found.verdict == "helped"
    assert found.gain is not None
    assert found.gain > 2


def test_a_larger_bound_buys_throughput_with_staleness() -> None:
    found = compare(audit(max_lag=0), audit(max_lag=4))
    assert found.verdict == "bought_with_staleness"
    assert found.gain is not None
    assert found.gain > 1.5
    assert compare(audit(max_lag=4), audit(max_lag=0)).verdict == "fresher_but_slower"


def test_devices_that_only_wait_hurt() -> None:
    assert compare(audit(train_s=1.0), audit(train_s=1.0, decode_s=[0.5] * 4)).verdict == "hurt"


def test_the_same_is_no_difference() -> None:
    found = compare(audit(), audit())
    assert (found.verdict, found.gain) == ("no_difference", 1.0)


@pytest.mark.parametrize(("faster", "verdict"), [(1.05, "no_difference"), (1.5, "helped"), (0.6, "hurt")])
def test_less_than_the_scatter_of_the_steps_is_no_difference(faster: float, verdict: str) -> None:
    before = audit()
    # The mean of these is known to 6 %, a quotient of two to 8.5 %, of which twice is noise.
    scattered = replace(before.figures, step_s=[0.5 + 0.5 * (place % 2) for place in range(32)])
    rate = before.figures.consumed_per_device_hour
    first = replace(before, figures=scattered)
    second = replace(before, figures=replace(scattered, consumed_per_device_hour=faster * rate))
    assert compare(first, second).verdict == verdict


def test_two_steps_are_too_few_to_tell() -> None:
    found = compare(audit(steps=2, score_s=0.6, scorers=1), audit(steps=2))
    assert (found.verdict, found.noise) == ("no_difference", None)
    assert json.loads(json.dumps(asdict(found), allow_nan=False))["noise"] is None


def test_the_four_figures_are_shown() -> None:
    out = io.StringIO()
    Console(file=out, width=140).print(shown(compare(audit(max_lag=0), audit(max_lag=4))))
    said = out.getvalue()
    assert said.startswith("the change bought throughput with staleness")
    for figure in (
        "samples per device-hour", "idle-wait, generation", "idle-wait, training", "weight-sync latency", "mean lag",
    ):  # fmt: skip
        assert figure in said


@pytest.mark.parametrize("steps", [1, 0])
def test_a_run_that_has_just_begun_is_reported_too(steps: int) -> None:
    run = simulated(steps=2)
    found = analyse(replace(run, steps=run.steps[:steps]))
    assert (found.bottleneck.name == "unknown") == (steps == 0)
    json.dumps(as_json(found), allow_nan=False)
    out = io.StringIO()
    Console(file=out).print(report(found))
    assert found.bottleneck.sentence.split()[0] in out.getvalue()
    assert page(found).endswith("</html>\n")
