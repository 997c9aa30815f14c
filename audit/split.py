"""How many producers the measured rates call for, and what that gains. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from audit.rates import Rates

HEADROOM = 0.05
"""Of a producer's rate, for lengths that differ from step to step."""
MOST = 64
"""Producers that are considered beyond those that there are."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A number of producers, with what is to be expected of it."""

    producers: int
    period_s: float
    samples_per_s: float
    samples_per_device_hour: float
    trainer_idle: float
    producer_idle: float


@dataclass(frozen=True, slots=True)
class Split:
    now: Choice
    """As the rates say of the producers that there are, if nothing but devices were in the way."""
    recommended: Choice
    """The smallest number at which the trainer does not wait for them."""
    best_per_device_hour: Choice
    """With the most samples per device-hour: where the trainer is the cheaper part, it may wait."""
    table: tuple[Choice, ...]

    @property
    def gain(self) -> float:
        """Samples per second of the recommended number over those of now; 1 is no gain."""
        return self.recommended.samples_per_s / self.now.samples_per_s if self.now.samples_per_s else 1.0


def split_of(rates: Rates) -> Split | None:
    """None where no step was made or a rate is not known, and where more producers would share a device with them."""
    if not (rates.samples and rates.generation_s and rates.trainer_s and rates.producers and rates.devices[0]):
        return None
    others = max(rates.trainer_s, rates.scoring_s)
    needed = max(1, math.ceil(rates.generation_s * (1 + HEADROOM) / others))
    here = max(1, round(rates.producers))
    table = tuple(_choice(rates, count) for count in range(1, min(max(here, needed) + 2, here + MOST)))
    at = {choice.producers: choice for choice in table}
    return Split(
        now=at.get(here) or _choice(rates, here),
        recommended=at.get(needed) or _choice(rates, needed),
        best_per_device_hour=max(table, key=lambda choice: choice.samples_per_device_hour),
        table=table,
    )


def _choice(rates: Rates, producers: int) -> Choice:
    per_producer = rates.devices[0] / max(1.0, round(rates.producers))
    devices = producers * max(1.0, per_producer) + rates.devices[1]
    period_s = rates.bound_s(producers)
    return Choice(
        producers=producers,
        period_s=period_s,
        samples_per_s=rates.samples / period_s,
        samples_per_device_hour=rates.samples * 3600 / (period_s * devices),
        trainer_idle=1 - rates.trainer_s / period_s,
        producer_idle=1 - rates.generation_s / producers / period_s,
    )
