"""Everything that the audit says of one run, from its records. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from audit.figures import Figures, figures
from audit.intensity import Process, Use, processes, uses
from audit.levers import Lever, Sign, levers_of, overlap_s, signs_of
from audit.path import Kind, Segment, critical_path, shares
from audit.rates import Rates, rates
from audit.records import Run
from audit.split import Split, split_of
from audit.verdict import Bottleneck, bottleneck_of


@dataclass(frozen=True, slots=True)
class Audit:
    run: Run
    figures: Figures
    path: tuple[Segment, ...]
    path_s: Mapping[Kind, float]
    rates: Rates
    split: Split | None
    bottleneck: Bottleneck
    overlap_s: float
    """What perfect overlapping could still save of the window."""
    levers: tuple[Lever, ...]
    signs: tuple[Sign, ...]
    uses: tuple[Use, ...]
    processes: tuple[Process, ...]


def analyse(run: Run) -> Audit:
    measured, rate = figures(run), rates(run)
    path = critical_path(run) if run.steps else []
    spent, split = shares(path), split_of(rate)
    bottleneck = bottleneck_of(run, measured, rate, split, path, spent)
    return Audit(
        run=run,
        figures=measured,
        path=tuple(path),
        path_s=spent,
        rates=rate,
        split=split,
        bottleneck=bottleneck,
        overlap_s=overlap_s(rate) * measured.steps if run.steps else 0.0,
        levers=tuple(levers_of(run, measured, rate, split, path, bottleneck)) if run.steps else (),
        signs=tuple(signs_of(run, measured, rate, spent)),
        uses=tuple(uses(run.intensity)),
        processes=tuple(processes(run.intensity)),
    )


def as_json(audit: Audit) -> dict[str, Any]:
    """What `headrace audit --json` prints. Seconds and hours as they are, shares from 0 to 1."""
    return {
        "run": audit.run.run_id,
        "bottleneck": asdict(audit.bottleneck),
        "figures": asdict(audit.figures),
        "critical_path_s": dict(audit.path_s),
        "overlap_could_save_s": audit.overlap_s,
        "rates": asdict(audit.rates),
        "split": asdict(audit.split) | {"gain": audit.split.gain} if audit.split else None,
        "levers": [asdict(lever) for lever in audit.levers],
        "signs": [asdict(sign) for sign in audit.signs],
        "intensity": [asdict(use) for use in audit.uses],
        "processes": [asdict(process) for process in audit.processes],
        "clock_offsets_s": dict(audit.run.offsets),
    }
