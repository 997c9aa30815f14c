"""What a run cost and what it got for it: device-hours, idle waits, weight-sync latency, staleness. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from audit.records import IDLE_PREFIX, LOST, Group, Run
from audit.sharing import device_seconds

HOUR = 3600.0
STAGES = {"producer": "generation", "scoring": "scoring", "trainer": "training", "weights": "weight_sync"}
"""Role of a lane to the stage that it works for."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Of some seconds or steps."""

    count: int
    median: float
    p95: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """None without a value."""
        if not values:
            return None
        ordered = sorted(values)
        return cls(len(ordered), statistics.median(ordered), _quantile(ordered, 0.95), ordered[-1])


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one run. "Window" is from the first batch to the last step; what comes before is start-up."""

    wall_s: float
    window_s: float
    device_hours: float
    """Of all devices, from each one's first record to its last."""
    device_hours_by_phase: Mapping[str, Mapping[str, float]]
    """Stage to phase to device-hours, over the whole run."""
    devices: Mapping[str, int]
    """Stage to devices in the window, at most at once; one that stages share counts for each of them."""
    idle_wait: Mapping[str, float]
    """Stage to the share of its lanes' time in the window in which it waited."""
    idle_by_reason: Mapping[str, Mapping[str, float]]
    """Stage to reason to its share of the stage's time in the window."""
    lost_s: float
    """Lane-seconds that killed processes did not get to record."""
    generated: int
    """Rollouts that were published in the window, to be trained on."""
    consumed: int
    """Rollouts that steps of the window trained on."""
    generated_per_device_hour: float
    consumed_per_device_hour: float
    dropped_groups: int
    dropped_device_hours: float
    """Of generating what nobody trained on."""
    sync_latency_s: Spread | None
    """From a version's seal to an engine's first token on it."""
    publish_s: Spread | None
    transfer_s: Spread | None
    swap_s: Spread | None
    consume_s: Spread | None
    """From a group's publish to the batch that took it."""
    lag: Mapping[int, int]
    """Lag to groups that were trained on."""
    mean_lag: float
    steps: int
    step_s: Sequence[float]
    """From each step's end to the next one's."""


def figures(run: Run) -> Figures:
    begin, end = run.window
    window_s = end - begin
    by_phase = _by_phase(run)
    hours = sum(sum(phases.values()) for phases in by_phase.values())
    devices = {stage: _devices(run, role, begin, end) for role, stage in STAGES.items()}
    in_window = sum(_device_seconds(run, begin, end)) / HOUR
    published = [g for g in run.groups if g.kind == "train" and begin <= g.published <= end]
    generated = sum(group.rollouts for group in published if group.outcome == "played")
    consumed = sum(step.rollouts for step in run.steps)
    lag = merged(step.lags for step in run.steps)
    dropped = [group for group in run.groups if group.kind == "train" and _is_dropped(group, run.dropped)]
    pieces = [piece for lane in run.lanes for piece in lane.pieces]
    return Figures(
        wall_s=max(piece.end for piece in pieces) - min(piece.begin for piece in pieces),
        window_s=window_s,
        device_hours=hours,
        device_hours_by_phase=by_phase,
        devices={stage: count for stage, count in devices.items() if count},
        idle_wait=_idle(run, begin, end),
        idle_by_reason=_reasons(run, begin, end),
        lost_s=sum(piece.seconds for piece in pieces if piece.phase == LOST),
        generated=generated,
        consumed=consumed,
        generated_per_device_hour=generated / in_window if in_window else 0.0,
        consumed_per_device_hour=consumed / in_window if in_window else 0.0,
        dropped_groups=len(dropped),
        dropped_device_hours=(sum(g.device_s for g in dropped if g.outcome == "played") + run.wasted_device_s) / HOUR,
        sync_latency_s=Spread.of([swap.latency_s for swap in run.swaps if swap.end > begin]),
        publish_s=Spread.of([publish.end - publish.begin for publish in run.publishes]),
        transfer_s=Spread.of(_transfers(run, begin)),
        swap_s=Spread.of([swap.end - swap.begin for swap in run.swaps]),
        consume_s=Spread.of(_waited(run)),
        lag=lag,
        mean_lag=sum(lag * count for lag, count in lag.items()) / max(1, sum(lag.values())),
        steps=len(run.steps),
        step_s=[after.end - before.end for before, after in zip(run.steps, run.steps[1:], strict=False)],
    )


def idle_wait(seconds: Mapping[str, float]) -> float:
    """Share of waiting phases; 0 for an empty interval."""
    total = sum(seconds.values())
    return sum(spent for phase, spent in seconds.items() if phase.startswith(IDLE_PREFIX)) / total if total else 0.0


def stage_seconds(run: Run, role: str, begin: float, end: float) -> dict[str, float]:
    """Device-seconds per phase of a role between two moments."""
    return merged(
        {phase: spent * max(1, lane.devices) for phase, spent in lane.seconds(begin, end).items()}
        for lane in run.of(role)
    )


Key = TypeVar("Key", str, int)
Number = TypeVar("Number", int, float)


def merged(parts: Iterable[Mapping[Key, Number]]) -> dict[Key, Number]:
    """The sums of what has the same key, in order of keys."""
    found: dict[Key, Number] = {}
    for part in parts:
        for key, value in part.items():
            found[key] = found.get(key, type(value)(0)) + value
    return dict(sorted(found.items()))


def _by_phase(run: Run) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for lane, spent in device_seconds(run.lanes):
        phases = found.setdefault(STAGES.get(lane.role, lane.role), {})
        for phase, seconds in spent.items():
            phases[phase] = phases.get(phase, 0.0) + seconds / HOUR
    return found


def _device_seconds(run: Run, begin: float, end: float) -> list[float]:
    return [sum(spent.values()) for _, spent in device_seconds(run.lanes, begin, end)]


def _devices(run: Run, role: str, begin: float, end: float) -> int:
    """The most at once; lanes that share a device have one together."""
    edges: list[tuple[float, int]] = []
    for lane in run.lanes:
        if lane.role == role and lane.is_device and lane.pieces:
            first, last = max(begin, lane.pieces[0].begin), min(end, lane.pieces[-1].end)
            if first < last:
                edges += [(first, lane.devices), (last, -lane.devices)]
    most = now = 0
    for _, change in sorted(edges):
        now += change
        most = max(most, now)
    return min(most, 1) if any(lane.shared for lane in run.of(role)) else most


def _idle(run: Run, begin: float, end: float) -> dict[str, float]:
    spent = {stage: stage_seconds(run, role, begin, end) for role, stage in STAGES.items()}
    return {stage: idle_wait(seconds) for stage, seconds in spent.items() if seconds}


def _reasons(run: Run, begin: float, end: float) -> dict[str, dict[str, float]]:
    found = {}
    for role, stage in STAGES.items():
        seconds = stage_seconds(run, role, begin, end)
        total = sum(seconds.values())
        waits = {phase.removeprefix(IDLE_PREFIX): s for phase, s in seconds.items() if phase.startswith(IDLE_PREFIX)}
        if waits and total:
            found[stage] = {reason: spent / total for reason, spent in waits.items()}
    return found


def _is_dropped(group: Group, dropped: Mapping[str, str]) -> bool:
    return group.outcome != "played" or group.task in dropped


def _transfers(run: Run, begin: float) -> list[float]:
    """Seconds in which a version's bytes came to a host, or into an engine on the trainer's host."""
    brought = [transfer.end - transfer.begin for transfer in run.transfers if transfer.end > begin]
    return brought or [swap.begin - swap.arrived for swap in run.swaps if swap.end > begin]


def _waited(run: Run) -> list[float]:
    published = {group.task: group.published for group in run.groups}
    return [step.formed - published[task] for step in run.steps for task in step.tasks if task in published]


def _quantile(ordered: Sequence[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
