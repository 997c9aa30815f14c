"""The recorder: a thread that writes what the lanes of a process do into its journal.

Wait graph: it waits for its time to come, or for `close`; only `close` waits for it. It is a thread of its own, so
that a process whose event loop or decode thread is busy is recorded all the same.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from headrace.errors import ServiceError
from headrace.hosts import host_name
from headrace.telemetry.arithmetic import Roofline
from headrace.telemetry.clock import EPOCH_S, now
from headrace.telemetry.dcgm import Exporter
from headrace.telemetry.nvml import Sampler
from headrace.telemetry.phases import Cut, Lane, Work

log = logging.getLogger(__name__)

EVERY_S = 0.9
"""Between two records of a lane: what a killed process loses at most, but for the time that writing takes."""
INTENSITY_S = 10.0
"""Between two records of how intensely a lane's device was used."""

Write = Callable[..., None]
"""`Journal.write`: an event and its fields. Raises ServiceError where there is no room."""


@dataclass(slots=True)
class _Intensity:
    """What the last record of a lane's intensity said."""

    at: float
    seconds: dict[str, float]
    done: dict[str, Work] = field(default_factory=dict)
    cpu_s: float = 0.0


class Recorder:
    """Of one process. Lanes come and go while it runs."""

    def __init__(self, write: Write, lanes: Iterable[Lane] = ()) -> None:
        self._write = write
        self._who = {"pid": os.getpid(), "host": host_name()}
        self._lanes: list[Lane] = []
        self._unwritten: dict[Lane, Cut] = {}
        """What found no room, or goes on with the phase that was written last."""
        self._written: dict[Lane, str] = {}
        """The phase in which the last record of a lane ended."""
        self._intensities: dict[Lane, _Intensity] = {}
        self._rooflines: dict[Lane, Roofline] = {}
        self._nvml, self._dcgm = Sampler(), Exporter()
        self._lock = threading.Lock()
        """Of all above: ticks are the thread's, the rest may be anybody's."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headrace-recorder", daemon=True)
        for lane in lanes:
            self.add(lane)

    def start(self) -> None:
        self._thread.start()

    def add(self, lane: Lane, roofline: Roofline | None = None) -> None:
        """Record this lane, too, from its beginning."""
        with self._lock:
            if lane not in self._lanes:
                self._lanes.append(lane)
                self._intensities[lane] = _Intensity(now(), lane.seconds(), cpu_s=time.process_time())
            if roofline is not None:
                self._rooflines[lane] = roofline

    def remove(self, lane: Lane) -> None:
        """It has ended in order."""
        with self._lock:
            if lane in self._lanes:
                self._say_intensity(lane)
                self._record(lane, last=True)
                self._lanes.remove(lane)
                del self._intensities[lane]

    def close(self) -> None:
        """Write all lanes to their end, where it was started. Idempotent."""
        if self._closing.is_set() or not self._thread.is_alive():
            return
        self._closing.set()
        self._thread.join()
        for lane in tuple(self._lanes):
            self.remove(lane)
        self._nvml.close()
        if self._unwritten:
            log.warning(
                "the disk has no room for the last records of %s", ", ".join(one.name for one in self._unwritten)
            )

    def tick(self) -> None:
        """Write every lane up to now."""
        with self._lock:
            still = [lane.name for lane in self._lanes if not self._record(lane)]
            if still:
                # Without room for it, the next one says it.
                with suppress(ServiceError):
                    self._write("still", lanes=still, until=now(), **self._who)
            for lane in self._lanes:
                if lane.place.uuid:
                    self._nvml.sample(lane.place.uuid)
                if now() - self._intensities[lane].at >= INTENSITY_S:
                    self._say_intensity(lane)

    def _run(self) -> None:
        self.tick()
        while not self._closing.wait(EVERY_S):
            self.tick()

    def _record(self, lane: Lane, *, last: bool = False) -> bool:
        """Write a lane up to now. False where it is still in the phase that was written last: then it is not."""
        cut = lane.cut()
        if lane in self._unwritten:
            cut = self._unwritten.pop(lane).then(cut)
        if not last and cut.sums.keys() == {self._written.get(lane)}:
            self._unwritten[lane] = cut
            return False
        try:
            self._write("spans", **span_fields(lane, cut), **self._who, **({"last": True} if last else {}))
        except ServiceError:
            # Those of the process say so; the next record contains this one.
            self._unwritten[lane] = cut
        else:
            self._written[lane] = cut.ends_in
        return True

    def _say_intensity(self, lane: Lane) -> None:
        before = self._intensities[lane]
        after = _Intensity(now(), lane.seconds(), lane.done(), time.process_time())
        if not after.done:
            return
        fields: dict[str, Any] = {
            "lane": lane.name,
            **self._who,
            "begin": before.at,
            "end": after.at,
            "phases": phase_work(before, after),
            "cpu_s": round(after.cpu_s - before.cpu_s, 3),
        }
        if roofline := self._rooflines.get(lane):
            fields["roofline"] = asdict(roofline)
        if nvml := self._nvml.take(lane.place.uuid):
            fields["nvml"] = nvml
        if lane.place.uuid and (dcgm := self._dcgm.profile(lane.place.uuid)):
            fields["dcgm"] = dcgm
        # Without room for it, the next one contains it.
        with suppress(ServiceError):
            self._write("intensity", **fields)
            self._intensities[lane] = after


def span_fields(lane: Lane, cut: Cut) -> dict[str, Any]:
    """A cut as the journal has it: seconds to the microsecond."""
    place = lane.place
    fields: dict[str, Any] = {"lane": lane.name, "kind": place.kind, "device": place.device, "devices": place.devices}
    if lane.thread:
        fields["thread"] = lane.thread
    if place.shared:
        fields["shared"] = True
    if place.estimated:
        fields["estimated"] = True
    fields["begin"] = round(EPOCH_S + cut.begin / 1e6, 6)
    if cut.spans is None:
        return {**fields, "sums": {phase: spent / 1e6 for phase, spent in cut.sums.items()}}
    return {**fields, "spans": [[phase, spent / 1e6] for phase, spent in cut.spans]}


def so_far(lanes: Iterable[Lane]) -> list[dict[str, Any]]:
    """The sums of these lanes since their beginning: what a heartbeat carries where there is no journal."""
    return [
        {
            "lane": lane.name,
            "kind": lane.place.kind,
            "device": lane.place.device,
            "devices": lane.place.devices,
            **({"shared": True} if lane.place.shared else {}),
            **({"estimated": True} if lane.place.estimated else {}),
            "begin": lane.began,
            "sums": {phase: round(spent, 6) for phase, spent in lane.seconds().items()},
        }
        for lane in lanes
    ]


def phase_work(before: _Intensity, after: _Intensity) -> Mapping[str, dict[str, float]]:
    """What was computed between two readings, by the phases that compute."""
    phases: dict[str, dict[str, float]] = {}
    for phase, work in after.done.items():
        earlier = before.done.get(phase, Work())
        seconds = after.seconds.get(phase, 0.0) - before.seconds.get(phase, 0.0)
        phases[phase] = {
            "seconds": round(seconds, 6),
            "flop": round(work.flop - earlier.flop),
            "bytes": round(work.nbytes - earlier.nbytes),
        }
    return phases
