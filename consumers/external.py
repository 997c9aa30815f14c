"""Devices that the run holds and that no process of it runs on: those of reward models, as the configuration says."""

from __future__ import annotations

from urllib.parse import urlsplit

from headrace.config import Config
from headrace.telemetry.phases import Lane, Place


def external_lanes(config: Config) -> list[Lane]:
    """A lane for each reward service that holds devices; one that several environments ask counts once."""
    devices: dict[str, int] = {}
    for environment in config.environments:
        for reward in environment.reward:
            if reward.is_service and reward.devices:
                parts = urlsplit(reward.name)
                name = f"external/{parts.netloc}{parts.path}"
                devices[name] = max(devices.get(name, 0), reward.devices)
    return [Lane(name, "held", place=Place("device", "external", count)) for name, count in devices.items()]
