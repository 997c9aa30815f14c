"""What one run recorded, read from its folder and typed. All times are seconds since the epoch, on the broker's clock.

Lanes come from the ledger; tasks, groups, steps, versions and drops from the journals of the services.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from headrace.errors import ServiceError

IDLE_PREFIX = "wait_"
LOST = "lost"
EXIT = "exit"
"""From the last record of a process that ended in order to its end."""


class Piece(NamedTuple):
    """One phase of a lane, from `begin` to `end`."""

    begin: float
    end: float
    phase: str

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    @property
    def idle(self) -> bool:
        return self.phase.startswith(IDLE_PREFIX)


@dataclass(frozen=True, slots=True)
class Lane:
    """One device or host thread of one process, in contiguous pieces."""

    service: str
    role: str
    """"producer", "trainer", "weights", …"""
    name: str
    kind: str
    """"device" or "host"."""
    host: str
    pid: int
    pieces: tuple[Piece, ...]
    devices: int = 1
    """How many devices it stands for; those of a host lane are not counted."""
    device: str = ""
    shared: bool = False
    """Whether its device is the one of all shared lanes of its host."""

    def seconds(self, begin: float = float("-inf"), end: float = float("inf")) -> dict[str, float]:
        """Seconds per phase between two moments."""
        spent: dict[str, float] = {}
        for piece in self.between(begin, end):
            spent[piece.phase] = spent.get(piece.phase, 0.0) + piece.seconds
        return spent

    def between(self, begin: float, end: float) -> Iterator[Piece]:
        """Its pieces, or what of them lies between two moments."""
        for place in range(bisect_right(self.pieces, begin, key=lambda piece: piece.end), len(self.pieces)):
            piece = self.pieces[place]
            if piece.begin >= end:
                break
            yield Piece(max(piece.begin, begin), min(piece.end, end), piece.phase)

    @property
    def is_device(self) -> bool:
        return self.kind == "device" and self.devices > 0


@dataclass(frozen=True, slots=True)
class Group:
    """A task's way through one producer. What it did not come to is at the same time as what it came to last."""

    task: str
    producer: str
    kind: str
    outcome: str
    admitted: float
    taken: float
    ready: float
    """When there was a version that it might start on."""
    started: float
    """Its first token."""
    decoded: float
    """Its last token."""
    scored: float
    published: float
    rollouts: int
    tokens: int
    device_s: float


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step."""

    step: int
    version: str
    formed: float
    """When its batch was formed."""
    end: float
    tasks: tuple[str, ...]
    rollouts: int
    tokens: int
    reward: float | None
    lags: Mapping[int, int]
    """Lag to groups."""


@dataclass(frozen=True, slots=True)
class Publish:
    version: str
    begin: float
    end: float
    """When the trainer could go on; it is sealed behind its back."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class Swap:
    """A version's way into one engine."""

    producer: str
    version: str
    arrived: float
    """Its first chunk."""
    begin: float
    """When decoding stood still for it."""
    end: float
    """When the engine sampled from it."""
    sealed: float
    nbytes: int

    @property
    def step(self) -> int:
        return step_of(self.version)

    @property
    def latency_s(self) -> float:
        """From the seal to the first token on it."""
        return max(0.0, self.end - self.sealed)


@dataclass(frozen=True, slots=True)
class Transfer:
    """A version that a weight service brought to its host."""

    service: str
    version: str
    begin: float
    end: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class Beat:
    """What a producer said of itself at one moment; counters are since its start."""

    producer: str
    time: float
    decoded_tokens: int
    occupancy: float
    """Share of slots that held a sequence, over the decode steps since the moment before."""
    event_loop_lag_s: float


@dataclass(frozen=True, slots=True)
class Run:
    """All of it."""

    run_id: str
    config: Mapping[str, Any]
    lanes: tuple[Lane, ...]
    groups: tuple[Group, ...] = ()
    steps: tuple[Step, ...] = ()
    publishes: tuple[Publish, ...] = ()
    swaps: tuple[Swap, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    beats: tuple[Beat, ...] = ()
    dropped: Mapping[str, str] = field(default_factory=dict)
    """Task to why the trainer did not use its group."""
    wasted_device_s: float = 0.0
    """Device-seconds of sampling what producers threw away themselves."""
    intensity: tuple[Mapping[str, Any], ...] = ()
    """Arithmetic and memory traffic per phase, as services wrote them, with `service`."""
    estimated: frozenset[tuple[str, str]] = frozenset()
    """Services and lanes whose split into phases is estimated."""
    offsets: Mapping[str, float] = field(default_factory=dict)
    """Host to the broker's clock minus its own, in seconds; it is added to all its times already."""

    @property
    def window(self) -> tuple[float, float]:
        """From the first batch to the last step: what comes before is start-up. Without two steps, all of it."""
        if len(self.steps) > 1:
            return self.steps[0].formed, self.steps[-1].end
        pieces = [lane.pieces for lane in self.lanes if lane.pieces]
        return min(each[0].begin for each in pieces), max(each[-1].end for each in pieces)

    def between(self, begin: float | None, end: float | None) -> Run:
        """Its steps between two moments, in seconds since its first record: they make the window."""
        origin = min(lane.pieces[0].begin for lane in self.lanes if lane.pieces)
        first = float("-inf") if begin is None else origin + begin
        last = float("inf") if end is None else origin + end
        return replace(self, steps=tuple(step for step in self.steps if step.formed >= first and step.end <= last))

    @property
    def in_turns(self) -> bool:
        """Whether trainer and engines take turns on one device."""
        return (self.config.get("run") or {}).get("placement") == "colocated"

    @property
    def max_lag(self) -> int:
        return int(self.config.get("staleness", {}).get("max_lag", 0))

    def of(self, role: str) -> list[Lane]:
        """Device lanes of a role; its host lanes where it has none."""
        lanes = [lane for lane in self.lanes if lane.role == role]
        return [lane for lane in lanes if lane.is_device] or lanes

    @property
    def trainer(self) -> list[Lane]:
        """Of the trainer, where it has several ranks of rank 0: the others do what that one orders."""
        return [lane for lane in self.of("trainer") if lane.name != "rank"]


Line = dict[str, Any]


def read_lines(file: Path) -> Iterator[Line]:
    """Lines of a journal. One that is being written, or that a crash tore, is left out."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return
    except OSError as error:
        raise ServiceError(f"journal {file} cannot be read: {error.strerror}") from error
    for row in text.splitlines():
        try:
            line = json.loads(row)
        except ValueError:
            continue
        if isinstance(line, dict):
            yield line


def step_of(version: str) -> int:
    """Of "2.17": 17; -1 for no version."""
    _, _, step = version.partition(".")
    return int(step) if step.isdigit() else -1
