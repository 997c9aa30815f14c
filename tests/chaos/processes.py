"""The services of a chaos run: real processes, each started again when it ends, as a supervisor does."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path

from deploy.events import exit_fields
from deploy.processes import Child, Command, describe_exit
from headrace.telemetry.journal import Journal

AGAIN_S = 0.2
"""Before a service that ended is started again."""
MARK = "HEADRACE_CHAOS"
"""In the environment of every process of a chaos run, and so of theirs."""


@dataclass(slots=True)
class Exit:
    """One end of one process."""

    part: str
    code: int
    excuse: str
    """The fault that ended it; empty where it ended by itself."""
    tail: list[str]

    def __str__(self) -> str:
        return f"{self.part} {describe_exit(self.code)}: {' | '.join(self.tail[-3:])}"


@dataclass(slots=True)
class Part:
    """One service. `child` is its newest process; None between two."""

    name: str
    module: str
    child: Child | None = None
    excuse: str = ""
    """Set by the fault that is about to end it."""
    starts: int = 0
    keeper: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        return self.child.pid if self.child is not None and self.child.code is None else None


@dataclass(slots=True)
class Fleet:
    """All services of one run."""

    urls: tuple[str, ...]
    """Ways to the same Redis; each start takes the next."""
    run_id: str
    logs: Path
    parts: dict[str, Part] = field(default_factory=dict)
    exits: list[Exit] = field(default_factory=list)
    journal: Journal | None = None
    """What a launcher would write."""
    ending: bool = False
    """The run is at its end: who leaves cleanly is not started again."""

    def add(self, name: str, module: str) -> None:
        part = self.parts[name] = Part(name, module)
        part.keeper = asyncio.create_task(self._keep(part), name=f"keep {name}")

    async def _keep(self, part: Part) -> None:
        while True:
            part.child = self._spawn(part)
            code = await part.child.exited()
            self.note(part.name, part.child, part.excuse)
            part.child, part.excuse = None, ""
            if self.ending and code == 0:
                return
            await asyncio.sleep(AGAIN_S)

    def note(self, name: str, child: Child, excuse: str) -> Exit:
        """A process has ended: write it down, and let nothing of it live on."""
        assert child.code is not None
        if self.journal is not None:
            self.journal.write("exited", **exit_fields(name, child))
        self.exits.append(Exit(name, child.code, excuse, child.tail()))
        child.kill()
        child.close()
        return self.exits[-1]

    def _spawn(self, part: Part) -> Child:
        resume = ("--resume",) if part.name == "trainer" and part.starts else ()
        part.starts += 1
        url = self.urls[sum(part.starts for part in self.parts.values()) % len(self.urls)]
        environ = {
            "HEADRACE_REDIS_URL": url,
            "HEADRACE_RUN": self.run_id,
            "HEADRACE_NAME": part.name,
            "HEADRACE_DEBUG": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            MARK: self.run_id,
        }
        argv = (sys.executable, "-m", part.module, *resume)
        return Child.spawn(Command(argv, environ, self.logs / f"{part.name}.log"))

    def signal(self, name: str, number: signal.Signals, excuse: str = "") -> bool:
        """False when there is no process now. With an excuse its end is no surprise."""
        part = self.parts[name]
        if part.pid is None:
            return False
        part.excuse = excuse
        os.kill(part.pid, number)
        return True

    def replace(self, name: str) -> Child:
        """Start a second process beside the one that runs, which is the caller's from now on."""
        part = self.parts[name]
        assert part.child is not None
        assert part.keeper is not None
        part.keeper.cancel()
        before = part.child
        part.keeper = asyncio.create_task(self._keep(part), name=f"keep {name}")
        return before

    async def ended(self, seconds: float) -> list[str]:
        """Wait for all to leave by themselves; names those that did not."""
        keepers = {part.keeper: name for name, part in self.parts.items() if part.keeper is not None}
        _, late = await asyncio.wait(keepers, timeout=seconds)
        return [keepers[task] for task in late]

    async def close(self) -> None:
        """Whatever still runs ends now."""
        for part in self.parts.values():
            if part.keeper is not None:
                part.keeper.cancel()
        await asyncio.gather(*(p.keeper for p in self.parts.values() if p.keeper), return_exceptions=True)
        for part in self.parts.values():
            if part.child is not None:
                part.child.kill()
                part.child.close()
                part.child = None
        if self.journal is not None:
            self.journal.close()

    @property
    def surprises(self) -> list[Exit]:
        """Ends that no fault explains."""
        return [end for end in self.exits if not end.excuse and not (self.ending and end.code == 0)]
