"""One run under chaos from its first step to the verdict."""

from __future__ import annotations

import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from headrace.errors import HeadraceError
from tests.chaos import checks
from tests.chaos.faults import Fault, end
from tests.chaos.replay import replay_wrong
from tests.chaos.world import World

LAST_STEPS = 25
"""More than are made while a trainer that still goes on for ever is told to leave."""
END_S = 180.0
"""What the last steps and everybody's leaving may take."""

Say = Callable[[str], None]


@dataclass(slots=True)
class Verdict:
    """What a chaos run has shown."""

    struck: Counter[str] = field(default_factory=Counter)
    minutes: float = 0.0
    steps: int = 0
    sheet: dict[str, int] = field(default_factory=dict)
    losses: int = 0
    wrong: list[str] = field(default_factory=list)

    @property
    def faults(self) -> int:
        return self.struck.total()

    def lines(self) -> list[str]:
        kinds = ", ".join(f"{name} {count}" for name, count in sorted(self.struck.items()))
        return [
            f"{self.faults} faults in {self.minutes:.1f} minutes: {kinds}",
            f"{self.steps} steps, sheet {self.sheet}, Redis lost writes {self.losses} times",
            *(f"WRONG: {sentence}" for sentence in self.wrong),
            "nothing wrong" if not self.wrong else f"{len(self.wrong)} things wrong",
        ]


async def chaos(
    folder: Path,
    plan: Iterable[Fault],
    *,
    minutes: float,
    seed: int,
    say: Say,
    replay: bool = True,
    exact: bool = True,
) -> Verdict:
    """Strike as planned, but no longer than so many minutes, then end the run and look.

    Everything is written to `folder`; `seed` decides how long and how hard each fault is. `exact` is for a plan of
    single faults.
    """
    world = await World.make(folder, seed)
    verdict = Verdict()
    try:
        await world.start()
        await world.progress(3)
        await _strike(world, plan, verdict, minutes, say)
        await _end(world)
        await _judge(world, verdict, say, replay=replay, exact=exact)
        verdict.wrong += checks.left_over(world.record.run_id)
        verdict.wrong += checks.ledger_wrong(Path(world.record.folder))
    except (AssertionError, TimeoutError, HeadraceError) as error:
        verdict.wrong.append(str(error) or traceback.format_exc())
        world.log("failed", reason=verdict.wrong[-1])
    finally:
        verdict.wrong += checks.exits_wrong(world.fleet.surprises) + checks.logs_wrong(world.fleet.logs)
        verdict.losses = world.losses
        await world.close()
    return verdict


async def _strike(world: World, plan: Iterable[Fault], verdict: Verdict, minutes: float, say: Say) -> None:
    """One fault after another, each after the run has got over the one before."""
    began = time.monotonic()
    for fault in plan:
        world.log("strikes", fault=fault.name)
        struck = time.monotonic()
        await fault.strike(world)
        await world.progress(world.random.randint(1, 4))
        verdict.struck[fault.name] += 1
        verdict.minutes = (time.monotonic() - began) / 60
        spent = time.monotonic() - struck
        world.log("over", fault=fault.name, seconds=round(spent, 2))
        say(f"{verdict.minutes:5.1f} min  {verdict.faults:4}  step {world.steps:5}  {fault.name} ({spent:.1f} s)")
        if verdict.minutes >= minutes:
            return


async def _end(world: World) -> None:
    """Name a last step, which a trainer that starts anew reads: it uses up what is outstanding and ends the run."""
    last = world.archive.history[-1].version.step + LAST_STEPS
    world.log("ends", last=last)
    await world.amend(last)
    await end(world, "trainer", signal.SIGTERM)
    world.fleet.ending = True
    late = await world.fleet.ended(END_S)
    assert not late, f"{', '.join(late)} did not leave within {END_S:.0f} s after the last step was named"


async def _judge(world: World, verdict: Verdict, say: Say, *, replay: bool, exact: bool) -> None:
    state = await world.operator.state()
    assert state.status == "finished", f"the run is {state.status}: {state.reason}"
    world.archive.follow()
    history = world.archive.history
    verdict.steps = len(history)
    verdict.wrong += checks.trained_wrong(history, state.step)
    verdict.wrong += checks.strangers(world.archive.entries(), history, world.fleet.parts)
    for sheet in await world.operator.balance():
        verdict.sheet = {"admitted": sheet.admitted, "outstanding": sheet.outstanding, **sheet.verdicts}
        verdict.wrong += checks.sheet_wrong(sheet, history, world.losses, exact=exact)
    verdict.wrong += checks.depths_wrong(await world.operator.depths())
    if replay:
        say(f"replays {len(history)} steps")
        verdict.wrong += await replay_wrong(world)
    verdict.wrong += await checks.keys_wrong(world)
