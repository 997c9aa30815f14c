"""The trainer's turns on a device that engines of its host use, too (`run.placement = "colocated"`)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from broker.api import ServicePort
from broker.turns import Device, shared_device
from headrace.config import Config
from headrace.hosts import host_name
from headrace.telemetry.phases import Lane


def device_in_turns(port: ServicePort, config: Config) -> Device | None:
    """The device that it shares; None where it has one of its own."""
    if config.run.placement != "colocated":
        return None
    return Device(port, shared_device(config, host_name()), "trainer", config.producer.lease_s)


class Turns:
    """Without a device they are all its own."""

    def __init__(self, device: Device | None, lane: Lane, free: Callable[[], None]) -> None:
        """`free` gives back what the device's allocator keeps of a step."""
        self._device = device
        self._lane = lane
        self._free = free

    @asynccontextmanager
    async def turn(self, unless: Callable[[], bool] = lambda: False) -> AsyncIterator[bool]:
        """The device is the trainer's within; False when `unless` came true before it was."""
        if self._device is None:
            yield True
            return
        try:
            with self._lane.during("wait_device"):
                has = await self._device.take(unless)
            yield has
            self._free()
        finally:
            await self._device.give_up()
