"""How intensely devices were used, beside how long they were busy. Pure.

Arithmetic and memory traffic of each phase stand against what the devices were measured to reach.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

GPU = {
    "sm": "SM",
    "memory": "GPU memory",
    "sm_active": "SM active",
    "sm_occupancy": "SM occupancy",
    "tensor_active": "tensor cores active",
    "dram_active": "DRAM active",
}
"""Names of the records and of the report. The first two are NVML's, and count time; the others are DCGM's."""


@dataclass(frozen=True, slots=True)
class Use:
    """One phase, over all devices that were in it. Rates are per second of one device."""

    phase: str
    seconds: float
    flop_per_s: float
    bytes_per_s: float
    of_flop: float | None
    """Share of what the devices were measured to reach; None where nobody measured it."""
    of_bytes: float | None

    @property
    def of_peak(self) -> float | None:
        """The larger share: a phase is bound by one of the two."""
        return max((share for share in (self.of_flop, self.of_bytes) if share is not None), default=None)


@dataclass(frozen=True, slots=True)
class Process:
    """One service, over its recorded time."""

    service: str
    cpu: float
    """Processor seconds per second."""
    gpu: Mapping[str, float]
    """Means of its GPU, from 0 to 1, by the names of `GPU`; those that were recorded."""


@dataclass(slots=True)
class _Sum:
    seconds: float = 0.0
    flop: float = 0.0
    nbytes: float = 0.0
    most_flop: float = 0.0
    """What the devices could have done in these seconds."""
    most_bytes: float = 0.0


def uses(lines: Iterable[Mapping[str, Any]]) -> list[Use]:
    """By phase, in which some arithmetic was done; the longest first."""
    sums: dict[str, _Sum] = {}
    for line in lines:
        roofline = line.get("roofline") or {}
        for phase, did in (line.get("phases") or {}).items():
            total = sums.setdefault(phase, _Sum())
            seconds = float(did.get("seconds") or 0.0)
            total.seconds += seconds
            total.flop += float(did.get("flop") or 0.0)
            total.nbytes += float(did.get("bytes") or 0.0)
            total.most_flop += seconds * float(roofline.get("flop_per_s") or 0.0)
            total.most_bytes += seconds * float(roofline.get("bytes_per_s") or 0.0)
    worked = {phase: total for phase, total in sums.items() if total.seconds > 0 and (total.flop or total.nbytes)}
    return [
        Use(
            phase=phase,
            seconds=total.seconds,
            flop_per_s=total.flop / total.seconds,
            bytes_per_s=total.nbytes / total.seconds,
            of_flop=total.flop / total.most_flop if total.most_flop else None,
            of_bytes=total.nbytes / total.most_bytes if total.most_bytes else None,
        )
        for phase, total in sorted(worked.items(), key=lambda item: -item[1].seconds)
    ]


@dataclass(slots=True)
class _Mean:
    wall: float = 0.0
    cpu: float = 0.0
    gpu: dict[str, tuple[float, float]] = field(default_factory=dict)
    """By name: the sum over time, and the seconds in which it was said."""


def processes(lines: Iterable[Mapping[str, Any]]) -> list[Process]:
    """By service, each with its means over time. Of a process with several lanes, one lane's lines count."""
    first: dict[tuple[str, Any], str] = {}
    means: dict[str, _Mean] = {}
    for line in lines:
        service = str(line.get("service", ""))
        if first.setdefault((service, line.get("pid")), str(line.get("lane"))) != str(line.get("lane")):
            continue
        mean, seconds = means.setdefault(service, _Mean()), float(line["end"]) - float(line["begin"])
        mean.wall += seconds
        mean.cpu += float(line.get("cpu_s") or 0.0)
        said = {**(line.get("nvml") or {}), **(line.get("dcgm") or {})}
        for name in (name for name in GPU if name in said):
            total, seen = mean.gpu.get(name, (0.0, 0.0))
            mean.gpu[name] = total + seconds * float(said[name]), seen + seconds
    return [
        Process(
            service=service,
            cpu=mean.cpu / mean.wall if mean.wall else 0.0,
            gpu={name: total / seen for name, (total, seen) in mean.gpu.items() if seen},
        )
        for service, mean in sorted(means.items())
    ]
