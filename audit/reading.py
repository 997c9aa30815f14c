"""From a run's folder to its typed records."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from audit import ledger
from audit.records import Beat, Group, Lane, Line, Publish, Run, Step, Swap, Transfer, read_lines
from headrace.errors import ConfigError, ServiceError

DROPPED = ("stale", "filtered", "failed", "dead", "superseded", "lost")
"""Events of the trainer that say that no step will use a group."""
OTHER_FILES = ("steps", "launcher")


def read(folder: Path) -> Run:
    """All that a run recorded. Raises ConfigError for a folder that holds no run or no records, ServiceError."""
    config = _json(folder / "config.json")
    if config is None:
        raise ConfigError(
            f"{folder} holds no run: it has no config.json; `headrace runs list` names those of this folder"
        )
    journals = {file.stem: list(read_lines(file)) for file in sorted(folder.glob("*.jsonl"))}
    services = {name: lines for name, lines in journals.items() if name not in OTHER_FILES}
    offsets = {name: offset_of(lines) for name, lines in services.items()}
    kept = ledger.of(journals, offsets)
    lanes = kept.lanes
    if not any(lane.pieces for lane in lanes):
        raise ConfigError(
            f"{folder} holds no records of lanes: it is of a run that has not begun, or of an older headrace"
        )
    trainer = services.get("trainer", [])
    admitted = _admitted(trainer, offsets.get("trainer", 0.0))
    reserve = min(1, int((config.get("staleness") or {}).get("max_lag", 0)))
    swaps = tuple(swap for name, lines in services.items() for swap in swaps_of(name, lines, offsets))
    groups = (
        group
        for name, lines in services.items()
        for group in groups_of(name, lines, offsets[name], admitted, swaps, reserve)
    )
    return Run(
        run_id=folder.name,
        config=config,
        lanes=lanes,
        groups=tuple(sorted(groups, key=lambda group: group.published)),
        steps=steps_of(journals.get("steps", []), trainer, offsets.get("trainer", 0.0)),
        publishes=publishes_of(trainer, offsets.get("trainer", 0.0)),
        swaps=swaps,
        transfers=tuple(one for name, lines in services.items() for one in transfers_of(name, lines, offsets[name])),
        beats=tuple(beat for name, lines in services.items() for beat in beats_of(name, lines, offsets[name])),
        dropped={str(line.get("task")): line["event"] for line in trainer if line.get("event") in DROPPED},
        wasted_device_s=sum(float(line.get("device_s") or 0.0) for line in _events(services, "wasted")),
        intensity=tuple(_events(services, "intensity")),
        estimated=kept.estimated,
        offsets=_by_host(lanes, offsets),
    )


def _events(services: Mapping[str, Iterable[Line]], event: str) -> Iterator[Line]:
    """All of a kind, each with its `service`."""
    for name, lines in services.items():
        yield from ({**line, "service": name} for line in lines if line.get("event") == event)


def offset_of(lines: Iterable[Line]) -> float:
    """The broker's clock minus a service's, in seconds: that of the reading which took the shortest."""
    readings = [line for line in lines if line.get("event") == "clock"]
    best = min(readings, key=lambda line: float(line.get("uncertainty_s", 0.0)), default=None)
    return float(best["offset_s"]) if best else 0.0


def steps_of(steps: Iterable[Line], trainer: Iterable[Line], offset: float) -> tuple[Step, ...]:
    """Steps in order; of one that was made anew the last line counts. A rollback is none."""
    trained = {int(line["step"]): line for line in trainer if line.get("event") == "trained"}
    found: dict[int, Step] = {}
    for line in steps:
        if line.get("event") != "step" or "restored" in line:
            continue
        step = int(line["step"])
        made = trained.get(step, {})
        end = float(made.get("end") or line["time"]) + offset
        begin = made.get("begin")
        found[step] = Step(
            step=step,
            version=str(line.get("version", "")),
            formed=float(begin) + offset if begin else end - float(line.get("seconds", 0.0)),
            end=end,
            tasks=tuple(map(str, made.get("tasks") or ())),
            rollouts=int(line.get("rollouts") or 0),
            tokens=int(line.get("loss_tokens") or 0),
            reward=line.get("reward"),
            lags={int(lag): int(count) for lag, count in (line.get("lag_histogram") or {}).items()},
        )
    return tuple(found[step] for step in sorted(found))


def groups_of(
    service: str,
    lines: Iterable[Line],
    offset: float,
    admitted: Mapping[str, tuple[float, int]],
    swaps: Sequence[Swap],
    reserve: int,
) -> list[Group]:
    """Groups of a producer's journal. `admitted` says of each task when, and at which step; tasks may start on versions
    at most `reserve` steps older than that.
    """
    mine = sorted((swap for swap in swaps if swap.producer == service), key=lambda swap: swap.end)
    return [_group(service, line, offset, admitted, mine, reserve) for line in lines if line.get("event") == "group"]


def _group(
    service: str,
    line: Line,
    offset: float,
    admitted: Mapping[str, tuple[float, int]],
    swaps: Sequence[Swap],
    reserve: int,
) -> Group:
    said = {name: float(value) + offset for name, value in (line.get("at") or {}).items() if value}
    published = said.get("published", float(line["time"]) + offset)
    taken = said.get("taken", published)
    asked, step = admitted.get(str(line["task"]), (taken, -1))
    ready = said.get("begun")
    if ready is None:
        # Of a producer that does not say when it began: once there was a version that it might start on.
        first = next((swap.end for swap in swaps if swap.step >= step - reserve), taken)
        ready = max(taken, first)
    started = said.get("first_token", published)
    decoded = max(started, said.get("decoded", published))
    tokens = int(line.get("tokens") or 0)
    return Group(
        task=str(line["task"]),
        producer=service,
        kind=str(line.get("kind", "train")),
        outcome="played" if line.get("outcome") in ("published", "repeated") else str(line.get("outcome")),
        admitted=min(asked, taken),
        taken=taken,
        ready=min(ready, started),
        started=started,
        decoded=decoded,
        scored=max(decoded, said.get("scored", published)),
        published=published,
        rollouts=len(line.get("rewards") or ()) or len(line.get("stopped") or ()),
        tokens=tokens or sum(line.get("stopped") or ()),
        device_s=float(line.get("device_s") or 0.0),
    )


def publishes_of(trainer: Iterable[Line], offset: float) -> tuple[Publish, ...]:
    return tuple(
        Publish(
            str(line["version"]),
            float(line["begin"]) + offset,
            float(line["end"]) + offset,
            int(line.get("nbytes") or 0),
        )
        for line in trainer
        if line.get("event") == "publish" and line.get("published", True)
    )


def swaps_of(service: str, lines: Iterable[Line], offsets: Mapping[str, float]) -> list[Swap]:
    """`sealed` is by the clock of the trainer's host."""
    here, there = offsets[service], offsets.get("trainer", 0.0)
    return [
        Swap(
            producer=service,
            version=str(line["version"]),
            arrived=float(line["arrived"]) + here,
            begin=float(line["begin"]) + here,
            end=float(line["end"]) + here,
            sealed=float(line["sealed"]) + there,
            nbytes=int(line.get("nbytes") or 0),
        )
        for line in lines
        if line.get("event") == "swap"
    ]


def transfers_of(service: str, lines: Iterable[Line], offset: float) -> list[Transfer]:
    return [
        Transfer(
            service,
            str(line["version"]),
            float(line["begin"]) + offset,
            float(line["end"]) + offset,
            int(line.get("nbytes") or 0),
        )
        for line in lines
        if line.get("event") == "imported" and line.get("begin") and line.get("end")
    ]


def beats_of(service: str, lines: Iterable[Line], offset: float) -> list[Beat]:
    return [
        Beat(
            service,
            float(line["time"]) + offset,
            int(line.get("decoded_tokens") or 0),
            float(line.get("occupancy") or 0.0),
            float(line.get("event_loop_lag_s") or 0.0),
        )
        for line in lines
        if line.get("event") == "state" and "decoded_tokens" in line
    ]


def _admitted(trainer: Iterable[Line], offset: float) -> dict[str, tuple[float, int]]:
    """Task to when it was admitted first, and at which step."""
    found: dict[str, tuple[float, int]] = {}
    for line in trainer:
        if line.get("event") == "admitted":
            for task in line.get("tasks") or ():
                found.setdefault(str(task), (float(line["time"]) + offset, int(line.get("step") or 0)))
    return found


def _by_host(lanes: Iterable[Lane], offsets: Mapping[str, float]) -> dict[str, float]:
    found: dict[str, list[float]] = defaultdict(list)
    for lane in lanes:
        found[lane.host].append(offsets.get(lane.service, 0.0))
    return {host: statistics.median(values) for host, values in found.items()}


def _json(file: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ServiceError(f"{file} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ServiceError(f"{file} cannot be read: it is not a JSON object")
    return value
