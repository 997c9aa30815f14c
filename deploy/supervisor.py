"""Keeps the parts of a local run alive: starts them, replaces the dead, gives up with a reason.

Wait graph
    keep (one per part)   waits for its process's end (the kernel wakes it through a pidfd), or between a death
                          and the next start for the back-off and then for the broker (the launcher's next answer
                          from it, whose own wait is bounded), or for `drain` and `stop`
    run                   waits for the first part that may not be missing: one that died beyond repair, or one
                          whose good end is the end of the run
    stop                  waits for all processes, at most the given seconds; then it kills them
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal

from deploy.outage import Outage
from deploy.processes import Child, Command, describe_exit
from deploy.restarts import LIMITS, Death, GiveUp, RestartLimits, decide
from headrace.errors import (
    BrokerError,
    CheckpointError,
    ConfigError,
    EngineError,
    Fenced,
    HeadraceError,
    ServiceError,
    WeightError,
)

log = logging.getLogger(__name__)

Report = Callable[[str, str, str], None]
"""Told of every event: (part, event, text)."""

Verdict = Literal["over", "died"]
"""An end of a part: its work is done, or it is missing."""


@dataclass(slots=True, eq=False)
class Part:
    """One thing that has to run: how it is started, and what became of it so far."""

    name: str
    role: str
    spawn: Callable[[bool], Child]
    """Starts its process; the argument says whether there was one before."""
    limits: RestartLimits
    child: Child | None = None
    deaths: list[Death] = field(default_factory=list)
    """Bounded by `limits.in_total`."""
    joined: bool = False
    """Whether the broker has seen the present process."""
    told_to_leave: asyncio.Event = field(default_factory=asyncio.Event)
    """Once set, its end is no death."""

    @classmethod
    def of(cls, name: str, role: str, command: Callable[[bool], Command]) -> Part:
        return cls(name, role, lambda again: Child.spawn(command(again)), LIMITS[role])

    @property
    def leaving(self) -> bool:
        return self.told_to_leave.is_set()

    @property
    def running(self) -> bool:
        return self.child is not None and self.child.code is None


class Supervisor:
    """All parts of one launcher."""

    def __init__(
        self,
        report: Report,
        judge: Callable[[Part, int], Awaitable[Verdict]],
        outage: Outage,
        exited: Callable[[str, Child], None] = lambda name, child: None,
    ) -> None:
        """`judge` says what it means that a part exited with a code on its own; it raises why that ends the run.
        `exited` is told of the end of every process, whatever it means, at once.
        """
        self._exited = exited
        self._report = report
        self._judge = judge
        self._outage = outage
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.parts: dict[str, Part] = {}
        self.restarts: dict[str, int] = {}
        """Replacements by role."""

    def add(self, part: Part) -> None:
        """Start a part (or take over its running child) and keep it."""
        if part.name in self.parts:
            raise ServiceError(f"there is a part named {part.name} already")
        self.parts[part.name] = part
        if part.child is None:
            part.child = part.spawn(False)
            self._report(part.name, "started", f"process {part.child.pid}")
        self._keepers[part.name] = asyncio.create_task(self._keep(part), name=f"keep-{part.name}")

    def of_role(self, role: str) -> list[Part]:
        """Parts of a role that are to stay, in the order in which they came."""
        return [part for part in self.parts.values() if part.role == role and not part.leaving]

    async def run(self) -> str:
        """Wait until the trainer has ended well (returns its name). Raises ServiceError for a part beyond repair."""
        return await asyncio.shield(self._over)

    def drain(self, part: Part) -> None:
        """Tell one part to leave; it is not replaced. Returns at once."""
        part.told_to_leave.set()
        self._report(part.name, "draining", "told to finish what it holds and leave")
        if part.child is not None:
            part.child.terminate()

    async def stop(self, roles: tuple[str, ...], seconds: float) -> list[str]:
        """Tell all parts of these roles to leave and wait; returns the names of those that had to be killed."""
        chosen = [part for part in self.parts.values() if part.role in roles]
        for part in chosen:
            part.told_to_leave.set()
            if part.child is not None:
                part.child.terminate()
        keepers = [self._keepers[part.name] for part in chosen if part.name in self._keepers]
        if keepers:
            await asyncio.wait(keepers, timeout=seconds)
        late = [part for part in chosen if part.running]
        for part in late:
            assert part.child is not None
            part.child.kill()
            self._report(part.name, "killed", f"it had not left after {seconds:.0f} s")
        return [part.name for part in late]

    def kill_all(self, spare: tuple[str, ...] = ()) -> None:
        """End every process at once, but those of the roles in `spare`. Callable also without an event loop."""
        for part in self.parts.values():
            part.told_to_leave.set()
            if part.child is not None and part.role not in spare:
                part.child.kill()

    async def close(self) -> None:
        """After all processes are gone: end the keepers."""
        self.kill_all()
        for keeper in self._keepers.values():
            keeper.cancel()
        await asyncio.gather(*self._keepers.values(), return_exceptions=True)
        if not self._over.cancel() and not self._over.cancelled():
            self._over.exception()

    async def _keep(self, part: Part) -> None:
        """Replace the part's process whenever it dies, until it may end, must leave, or is beyond repair."""
        try:
            while await self._outlive(part):
                part.joined = False
                part.child = part.spawn(True)
                self.restarts[part.role] = self.restarts.get(part.role, 0) + 1
                self._report(part.name, "replaced", f"process {part.child.pid}")
        except HeadraceError as error:
            self._end(error)
        finally:
            if part.leaving:
                self.parts.pop(part.name, None)
                self._keepers.pop(part.name, None)

    async def _outlive(self, part: Part) -> bool:
        """Wait for the end of the present process. True when it is to be started again, after the back-off."""
        child = part.child
        assert child is not None
        code = await child.exited()
        self._exited(part.name, child)
        # What it started itself (reward workers) goes with it.
        child.kill()
        child.close()
        if part.leaving:
            self._report(part.name, "left", describe_exit(code))
            return False
        verdict = await self._judge(part, code)
        if verdict == "over":
            self._report(part.name, "ended", "its work is done")
            if part.role == "trainer":
                self._end(part.name)
            return False
        away = self._outage.was_since(child.started)
        part.deaths.append(Death(code, time.monotonic() - child.started, part.joined, away))
        self._report(part.name, "died", f"process {child.pid} {describe_exit(code)}; its log: {child.log}")
        decision = decide(part.deaths, part.limits)
        if isinstance(decision, GiveUp):
            own = own_sentence(part, child)
            kind = KINDS.get(code, ServiceError) if own else ServiceError
            raise kind(obituary(part, child, code, own or decision.reason))
        return await self._back_off(part, decision.after_s)

    async def _back_off(self, part: Part, seconds: float) -> bool:
        """Wait before a new start, also for the broker to be there. False when there is to be none any more."""
        try:
            async with asyncio.timeout(seconds):
                await part.told_to_leave.wait()
        except TimeoutError:
            pass
        if part.role == "redis" or part.leaving:
            return not part.leaving
        waits = [asyncio.ensure_future(event.wait()) for event in (part.told_to_leave, self._outage.answers)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return not part.leaving

    def _end(self, outcome: str | HeadraceError) -> None:
        if self._over.done():
            log.warning("after the end: %s", outcome)
        elif isinstance(outcome, HeadraceError):
            self._over.set_exception(outcome)
        else:
            self._over.set_result(outcome)


# A run ends as its service did, when that said why: with an error of the same exit code.
KINDS: dict[int, type[HeadraceError]] = {
    kind.exit_code: kind
    for kind in (ConfigError, BrokerError, EngineError, WeightError, CheckpointError, Fenced, ServiceError)
}


def own_sentence(part: Part, child: Child) -> str:
    """What a service says when it ends with an error of its own; empty when something else ended it."""
    said = [line.strip() for line in child.tail() if line.startswith(f"{part.name}: ")]
    return said[-1] if said else ""


def obituary(part: Part, child: Child, code: int, reason: str) -> str:
    """Why a run ends with this part: its own sentence where it left one, else the end of its log."""
    where = f"(log: {child.log})"
    if reason.startswith(f"{part.name}: "):
        return f"{part.name} {describe_exit(code)}: {reason} {where}"
    tail = "".join(f"\n  {line}" for line in child.tail())
    return f"{part.name} {describe_exit(code)}; {reason} {where}{tail and ':' + tail}"
