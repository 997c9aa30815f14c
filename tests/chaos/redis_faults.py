"""What happens to Redis and to the connections to it."""

from __future__ import annotations

import asyncio
import signal

from redis import exceptions

from tests.chaos.world import LEASE_S, World

TAIL_S = 1.0
"""Redis syncs its file once a second: a machine that loses power loses so much."""


async def kill(world: World) -> None:
    """Everything it has answered for is in the kernel's hands, and comes back."""
    world.server.crash()
    await asyncio.sleep(world.random.uniform(0.0, 3.0) * LEASE_S)
    await world.server.again()


async def term(world: World) -> None:
    await asyncio.to_thread(world.server.leave)
    await asyncio.sleep(world.random.uniform(0.0, 3.0) * LEASE_S)
    await world.server.again()


async def freeze(world: World) -> None:
    world.server.signal(signal.SIGSTOP)
    await asyncio.sleep(world.random.uniform(0.1, 3.0) * LEASE_S)
    world.server.signal(signal.SIGCONT)


async def lose_tail(world: World) -> None:
    """It dies, and its file lacks some of what it wrote in the last second."""
    world.server.crash()
    oldest, end = world.archive.newest(TAIL_S)
    size = world.random.randint(oldest, end)
    world.archive.cut(size)
    world.losses += 1
    world.log("tail lost", bytes=end - size, of=end)
    await asyncio.sleep(world.random.uniform(0.0, 2.0) * LEASE_S)
    await world.server.again()
    await _healed(world)


async def flush(world: World) -> None:
    """Somebody empties it."""
    world.losses += 1
    async with world.server.client() as client:
        await client.flushall()
    await _healed(world)


async def _healed(world: World) -> None:
    """Only a checkpoint ends the time in which the trainer, too, must not be lost."""
    step = world.archive.history[-1].version.step if world.archive.records else 0
    await world.until(lambda: world.saved >= step, f"a checkpoint contains step {step}")


async def full(world: World) -> None:
    """It may take no more memory, for a while."""
    async with world.server.client() as client:
        used = int((await client.info("memory"))["used_memory"])
        await client.config_set("maxmemory", used)
        await asyncio.sleep(world.random.uniform(0.5, 4.0) * LEASE_S)
        await client.config_set("maxmemory", 0)


async def forget_scripts(world: World) -> None:
    async with world.server.client() as client:
        await client.script_flush()


async def slow(world: World) -> None:
    """It answers nobody for a while, and then everybody."""
    async with world.server.client() as client:
        await client.client_pause(round(world.random.uniform(0.1, 3.0) * LEASE_S * 1000))


async def cut_connections(world: World) -> None:
    """All of them at once, several times."""
    for _ in range(world.random.randint(1, 3)):
        async with world.server.client() as client:
            try:
                await client.client_kill_filter(_type="normal", skipme=True)
            except exceptions.ResponseError:
                return  # nobody was connected
        await asyncio.sleep(world.random.uniform(0.0, 0.5))
