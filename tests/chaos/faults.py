"""The faults, as data: what each is called, how often it is chosen, and what it does.

A fault returns once it is undone: what it stopped goes on, what it filled has room again. Whether the run has got over
it is the driver's question (`World.progress`).
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from tests.chaos import entries, redis_faults, wire_faults
from tests.chaos.world import JOIN_S, LEASE_S, World

FENCED = 8
"""Exit code of a trainer that a newer one has replaced."""


@dataclass(frozen=True, slots=True)
class Fault:
    name: str
    weight: float
    strike: Callable[[World], Awaitable[None]]
    service: bool = False
    """It strikes a service, and not what lies between services."""


def named(*names: str) -> tuple[Fault, ...]:
    """Faults whose name begins with one of these, each of them once for each; all without any."""
    found = tuple(fault for name in names or ("",) for fault in FAULTS if fault.name.startswith(name))
    if not found:
        raise ValueError(f"no fault begins with {' or '.join(names)}; there are {', '.join(f.name for f in FAULTS)}")
    return found


def drawn(seed: float, faults: Sequence[Fault], count: int) -> Iterator[Fault]:
    """So many of these by their weights; the same for the same seed."""
    generator = random.Random(seed)
    for _ in range(count):
        yield generator.choices(faults, [fault.weight for fault in faults])[0]


def paired(seed: int, faults: Sequence[Fault], count: int) -> Iterator[Fault]:
    """Two at once, one of a service and one of what lies between them: more than exactness is promised for.

    An emptied Redis without a trainer is none: then only the launcher knows that there is a run.
    """
    generator = random.Random(seed)
    services = [fault for fault in faults if fault.service]
    others = [fault for fault in faults if not fault.service and fault.strike is not redis_faults.flush]
    for first, second in zip(drawn(generator.random(), services, count), drawn(seed, others, count), strict=True):
        yield Fault(f"{first.name} + {second.name}", 1.0, partial(_both, first=first, second=second))


async def _both(world: World, first: Fault, second: Fault) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(first.strike(world))
        await asyncio.sleep(world.random.uniform(0.0, 0.5))
        group.create_task(second.strike(world))


async def end(world: World, name: str, number: signal.Signals) -> None:
    """A service is killed, or told to leave; its supervisor starts another."""
    part = world.fleet.parts[name]
    starts = part.starts
    if world.fleet.signal(name, number, excuse=number.name):
        await world.until(lambda: part.starts > starts, f"{name} was started again")


async def freeze(world: World, name: str) -> None:
    """A service stands still, for less than its lease or for several, and goes on as if nothing had been."""
    seconds = LEASE_S * world.random.uniform(0.1, 3.0)
    world.log("frozen", part=name, seconds=round(seconds, 2))
    if world.fleet.signal(name, signal.SIGSTOP):
        await asyncio.sleep(seconds)
        world.fleet.signal(name, signal.SIGCONT)


async def zombie(world: World) -> None:
    """A trainer stands still, another takes its place, and the first wakes up: it must find itself fenced."""
    if not world.fleet.signal("trainer", signal.SIGSTOP):
        return
    before = world.fleet.replace("trainer")
    try:
        await world.progress(world.random.randint(1, 6))
        os.kill(before.pid, signal.SIGCONT)
        async with asyncio.timeout(JOIN_S):
            code = await before.exited()
    finally:
        before.kill()
        world.fleet.note("zombie", before, "a newer trainer")
    assert code == FENCED, f"the trainer that was replaced while it stood still exited with {code}, not {FENCED}"


def _of_services() -> list[Fault]:
    faults = []
    for name, weight in (("producer-1", 2.0), ("producer-2", 2.0), ("trainer", 3.0), ("weights", 1.0)):
        faults += [
            Fault(f"kill {name}", weight, partial(end, name=name, number=signal.SIGKILL), True),
            Fault(f"term {name}", weight / 2, partial(end, name=name, number=signal.SIGTERM), True),
            Fault(f"stop {name}", weight / 2, partial(freeze, name=name), True),
        ]
    return faults


FAULTS = (
    *_of_services(),
    Fault("zombie trainer", 2.0, zombie, True),
    Fault("redis kill", 3.0, redis_faults.kill),
    Fault("redis term", 1.0, redis_faults.term),
    Fault("redis stop", 2.0, redis_faults.freeze),
    Fault("redis tail", 3.0, redis_faults.lose_tail),
    Fault("redis flush", 1.0, redis_faults.flush),
    Fault("redis full", 1.0, redis_faults.full),
    Fault("redis scripts", 1.0, redis_faults.forget_scripts),
    Fault("redis slow", 1.0, redis_faults.slow),
    Fault("redis cut", 3.0, redis_faults.cut_connections),
    Fault("wire late", 1.0, wire_faults.late),
    Fault("wire stall", 2.0, wire_faults.stall),
    Fault("wire loses", 3.0, wire_faults.lose_answers),
    Fault("forge entries", 4.0, entries.forge),
)
