"""A short run under chaos: the kinds of faults in turn, and everything that must hold afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.driver import chaos
from tests.chaos.faults import named

PLAN = (
    "kill producer-1",
    "forge entries",
    "kill trainer",
    "redis kill",
    "wire loses",
    "stop producer-2",
    "redis tail",
    "redis cut",
    "kill weights",
    "redis flush",
    "wire stall",
    "forge entries",
    "term producer-2",
)
SEED = 11


@pytest.mark.timeout(900)
async def test_a_run_gets_over_one_fault_after_another(tmp_path: Path) -> None:
    lines: list[str] = []
    verdict = await chaos(tmp_path, named(*PLAN), minutes=10, seed=SEED, say=lines.append)
    assert verdict.wrong == [], "\n".join([*lines, *verdict.lines()])
    assert verdict.faults == len(PLAN)
    assert verdict.losses == 2
