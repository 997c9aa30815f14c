"""The lanes of a trainer: its own, and those of devices that the run holds and no process of it runs on."""

from __future__ import annotations

from urllib.parse import urlsplit

from headrace.config import Config
from headrace.telemetry.clock import process_began
from headrace.telemetry.phases import Lane, Place


def trainer_lane(config: Config) -> Lane:
    """From the beginning of the process on."""
    lane = Lane("trainer", "start", place=Place("device", config.model.device, 1))
    lane.place.shared = config.run.placement != "disaggregated"
    lane.backdate(process_began())
    return lane


def rank_lane(config: Config) -> Lane:
    """Of a rank beside rank 0."""
    lane = Lane("rank", "start", place=Place("device", config.model.device, 1))
    lane.backdate(process_began())
    return lane


def external_lanes(config: Config) -> list[Lane]:
    """A lane for each reward service that holds devices, as the configuration says; one that several environments ask
    counts once.
    """
    devices: dict[str, int] = {}
    for environment in config.environments:
        for reward in environment.reward:
            if reward.is_service and reward.devices:
                parts = urlsplit(reward.name)
                name = f"external/{parts.netloc}{parts.path}"
                devices[name] = max(devices.get(name, 0), reward.devices)
    return [Lane(name, "held", place=Place("device", "external", count)) for name, count in devices.items()]
