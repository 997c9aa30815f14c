"""What overlapping generation and training brings, against taking turns, on two cores: one core per stage.

    figure                     bar    what is divided by what
    disaggregated_vs_stages    0.95   consumed samples/s of a whole run at max_lag 4, over the slower of its two stages
                                      uncoupled
    disaggregated_vs_serial    1.9    consumed samples/s on two devices that overlap, over one device that takes turns;
                                      long-tailed lengths, and a train step as long as a rollout of its batch
    scripted_vs_stages         -      the first figure with simulated devices
    hybrid_vs_serial           -      SmolLM2 on one core: both stages at the same time, over in turns

Every run is one of `headrace up`, and its figures are those that the audit reads from its records. "Serial" takes turns
on one device with `max_lag` 0: generate a batch, train on it, take the weights in. The scripted engine and the loss of
its trainer only wait, as on devices of their own, so that what is measured is the coupling; `hybrid` is left out there:
two that wait do not slow each other down. How long a rollout of a batch takes is measured by a serial run whose train
step takes no time. The stages are measured uncoupled and beside each other (`overlap_runs.py`).
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.overlap_parts import ENVIRONMENT, LOSS, save_tiny_model
from benchmarks.overlap_runs import Stages, Whole, stages, whole
from benchmarks.report import Figure, arguments, report

BARS: dict[str, float | None] = {
    "disaggregated_vs_stages": 0.95,
    "disaggregated_vs_serial": 1.9,
    "scripted_vs_stages": None,
    "hybrid_vs_serial": None,
}
MIXES = {"equal": 0.0, "mixed": 0.5, "long-tailed": 1.0}
"""Name to the spread of completion lengths (sigma of their logarithm)."""
FIGURES_OF = "long-tailed"
SERIAL = ("colocated", 0)
OVERLAPPED = ("disaggregated", 4)
STEPS, MODEL_STEPS = 12, 8
SCRIPTED = """
[run]
steps = {steps}
placement = "{placement}"
[model]
path = "{model}"
context_length = 256
device = "cpu"
[[environments]]
name = "{environment}"
[sampling]
max_new_tokens = 128
[producer]
engine = "scripted"
engine_options = {{ length_mean = 32.0, length_sigma = {sigma}, step_s = 0.02 }}
slots = 16
[trainer]
groups_per_step = 4
group_size = 4
autocast = "off"
loss = "{loss}"
[staleness]
max_lag = {max_lag}
[checkpoint]
every = 1000
"""
SMOLLM2 = """
[run]
steps = {steps}
placement = "{placement}"
[model]
context_length = 128
device = "cpu"
[[environments]]
name = "arithmetic"
[sampling]
max_new_tokens = 16
[producer]
slots = 32
[trainer]
groups_per_step = 4
group_size = 8
learning_rate = 2e-5
[staleness]
max_lag = {max_lag}
[checkpoint]
every = 1000
"""


@dataclass(slots=True)
class Bench:
    """Runs in a folder; what they gave stands in a table."""

    folder: Path
    table: Table
    progress: Console = field(default_factory=lambda: Console(stderr=True))
    made: int = 0

    def run(self, what: str, toml: str, how: tuple[str, int], step_s: float = 0.0) -> Whole:
        self.made += 1
        name = f"run-{self.made}"
        done = whole(self.folder, name, toml, step_s)
        idle = done.figures.idle_wait
        self.progress.print(f"{what}, {how[0]}: {done.samples_per_s:.2f} samples/s", style="dim")
        self.table.add_row(
            what, how[0] if how != SERIAL else "serial co-located", str(how[1]), f"{done.samples_per_s:.2f}",
            f"{done.samples_per_device_hour:.0f}", f"{idle['generation']:.0%}", f"{idle['training']:.0%}",
            f"{done.figures.mean_lag:.1f}",
        )  # fmt: skip
        return done

    def uncoupled(self, what: str, toml: str, steps: int, step_s: float = 0.0) -> Stages:
        self.made += 1
        done = stages(self.folder, f"stages-{self.made}", toml, steps, step_s)
        self.progress.print(f"{what}, stages: {done.generated:.2f}, {done.trained:.2f} samples/s", style="dim")
        for stage, rate in (("generation", done.generated), ("training", done.trained)):
            self.table.add_row(what, f"{stage} alone", "", f"{rate:.2f}", *[""] * 4)
        return done


def scripted(bench: Bench, model: Path, repeats: int) -> dict[str, Figure]:
    def toml(sigma: float, placement: str, max_lag: int, steps: int = STEPS) -> str:
        return SCRIPTED.format(
            model=model, environment=ENVIRONMENT, loss=LOSS, sigma=sigma, placement=placement, max_lag=max_lag,
            steps=steps,
        )  # fmt: skip

    found: dict[str, Figure] = {}
    for mix, sigma in MIXES.items():
        rollout_s = bench.run(f"scripted, {mix}, no training", toml(sigma, *SERIAL), SERIAL).wait_s
        what = f"scripted, {mix}, {rollout_s:.1f} s each"
        rates: dict[tuple[str, int], list[float]] = {SERIAL: [], OVERLAPPED: []}
        alone: list[float] = []
        for _ in range(repeats if mix == FIGURES_OF else 1):
            for how, each in rates.items():
                each.append(bench.run(what, toml(sigma, *how), how, rollout_s).samples_per_s)
            if mix == FIGURES_OF:
                alone.append(bench.uncoupled(what, toml(sigma, *OVERLAPPED), STEPS, rollout_s).slower)
        if mix == FIGURES_OF:
            overlapped, serial = (statistics.median(rates[how]) for how in (OVERLAPPED, SERIAL))
            found["disaggregated_vs_serial"] = figure("disaggregated_vs_serial", overlapped, serial)
            found["scripted_vs_stages"] = figure("scripted_vs_stages", overlapped, statistics.median(alone))
    return found


def smollm2(bench: Bench, repeats: int) -> dict[str, Figure]:
    ways = (SERIAL, ("hybrid", 4), OVERLAPPED)
    rates: dict[tuple[str, int], list[float]] = {how: [] for how in ways}
    alone: list[float] = []
    for _ in range(repeats):
        for how in ways:
            toml = SMOLLM2.format(placement=how[0], max_lag=how[1], steps=MODEL_STEPS)
            rates[how].append(bench.run("SmolLM2", toml, how).samples_per_s)
        alone.append(bench.uncoupled("SmolLM2", toml, MODEL_STEPS).slower)
    serial, hybrid, overlapped = (statistics.median(rates[how]) for how in ways)
    return {
        "disaggregated_vs_stages": figure("disaggregated_vs_stages", overlapped, statistics.median(alone)),
        "hybrid_vs_serial": figure("hybrid_vs_serial", hybrid, serial),
    }


def figure(name: str, value: float, baseline: float) -> Figure:
    return Figure(value, "samples/s", baseline, value / baseline, BARS[name])


def main(argv: list[str]) -> int:
    parser = arguments(__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--repeats", type=int, default=3, help="of what the figures come from (default 3)")
    parser.add_argument("--only", choices=("scripted", "smollm2"), help="leave the other engine out")
    given = parser.parse_args(argv)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        parser.error("two cores are needed, one for each stage")
    os.sched_setaffinity(0, cores[-2:])
    table = Table(title="placements, on two cores")
    for heading in ("work", "placement", "max_lag", "samples/s", "per device-hour", "generation idle", "training idle"):
        table.add_column(heading)
    table.add_column("mean lag")
    found: dict[str, Figure] = {}
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), table)
        if given.only != "smollm2":
            found |= scripted(bench, save_tiny_model(Path(folder) / "model"), given.repeats)
        if given.only != "scripted":
            found |= smollm2(bench, given.repeats)
    Console(width=150).print(table)
    ordered = {name: found[name] for name in BARS if name in found}
    return report("overlap", ordered, json_file=given.json, check=given.check)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
