"""What happens on the wire between services and Redis."""

from __future__ import annotations

import asyncio

from tests.chaos.world import LEASE_S, World


async def late(world: World) -> None:
    """Every piece arrives late, so that a service needs longer for everything."""
    world.proxy.delay_s = world.random.uniform(0.02, 0.3) * LEASE_S
    await asyncio.sleep(world.random.uniform(1.0, 4.0) * LEASE_S)
    world.proxy.delay_s = 0.0


async def stall(world: World) -> None:
    """Connections are there, and nothing passes; then everything does."""
    world.proxy.hold()
    await asyncio.sleep(world.random.uniform(0.5, 3.0) * LEASE_S)
    world.proxy.go_on()


async def lose_answers(world: World) -> None:
    """Redis did what it was asked, and the answer never arrives: the connection breaks instead."""
    for _ in range(world.random.randint(1, 5)):
        world.proxy.answers_to_lose = world.random.randint(1, 3)
        await asyncio.sleep(world.random.uniform(0.05, 0.5) * LEASE_S)
    world.proxy.answers_to_lose = 0
