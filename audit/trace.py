"""One timeline of a run, as the JSON that Perfetto and chrome://tracing read. Pure.

A process per service, a track per lane, on the broker's clock. Beside each producer lies a second process with a track
for each group that was in play at once: its wait, its decoding, its scoring. Arrows lead from a task's admission
through its group's decoding, scoring and publish to the step that trained on it, and from a publish to each swap.

Format: "Trace Event Format" of Chromium; times are microseconds since the run's first record.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from typing import Any

from audit.records import Group, Lane, Publish, Run, Step, Swap

Event = dict[str, Any]
_IN_PLAY = "groups"
_VERSIONS = "versions"


def trace(run: Run, begin: float | None = None, end: float | None = None) -> dict[str, Any]:
    """What lies between two moments, in seconds since the run's first record; by default all of it."""
    origin = min(lane.pieces[0].begin for lane in run.lanes if lane.pieces)
    first = float("-inf") if begin is None else origin + begin
    last = float("inf") if end is None else origin + end
    events = [event for event in _Tracks(run, origin).all() if _within(event, origin, first, last)]
    return {
        "traceEvents": _whole_flows(events),
        "displayTimeUnit": "ms",
        "otherData": {"run": run.run_id, "origin_epoch_s": origin, "clock_offsets_s": dict(run.offsets)},
    }


class _Tracks:
    """Numbers of processes and tracks, and the events on them."""

    def __init__(self, run: Run, origin: float) -> None:
        self._run = run
        self._origin = origin
        self._processes: dict[str, int] = {}
        self._tracks: dict[tuple[str, str], int] = {}
        self._named: list[Event] = []

    def all(self) -> list[Event]:
        run = self._run
        steps = {task: step for step in run.steps for task in step.tasks}
        events = [
            *(event for lane in run.lanes for event in self._lane(lane)),
            *self._groups(run.groups, steps),
            *(event for step in run.steps for event in self._step(step)),
            *self._weights(run.publishes, run.swaps),
        ]
        return [*self._named, *events]

    def _lane(self, lane: Lane) -> Iterator[Event]:
        place = self._place(f"{lane.service} (pid {lane.pid} on {lane.host})", lane.name)
        for piece in lane.pieces:
            yield self._slice(place, piece.phase, piece.begin, piece.end, {})

    def _groups(self, groups: Iterable[Group], steps: dict[str, Step]) -> Iterator[Event]:
        """Each on the first track of its producer that is free when it is taken."""
        free: dict[str, list[int]] = {}
        busy: dict[str, list[tuple[float, int]]] = {}
        for group in sorted(groups, key=lambda group: group.taken):
            mine, playing = free.setdefault(group.producer, []), busy.setdefault(group.producer, [])
            while playing and playing[0][0] <= group.taken:
                heapq.heappush(mine, heapq.heappop(playing)[1])
            track = heapq.heappop(mine) if mine else len(playing)
            heapq.heappush(playing, (group.published, track))
            yield from self._group(group, track, steps.get(group.task))

    def _group(self, group: Group, track: int, step: Step | None) -> Iterator[Event]:
        place = self._place(f"{group.producer} {_IN_PLAY}", f"group {track + 1}")
        said = {"task": group.task, "outcome": group.outcome, "rollouts": group.rollouts, "tokens": group.tokens}
        stages = (
            ("wait_version", group.taken, group.ready),
            ("wait_slot", group.ready, group.started),
            ("decode", group.started, group.decoded),
            ("score", group.decoded, group.scored),
            ("publish", group.scored, group.published),
        )
        for name, begin, end in stages:
            if end > begin:
                yield self._slice(place, name, begin, end, said)
        admission = self._place("trainer steps", "admission")
        yield self._slice(admission, f"admit {group.task}", group.admitted, group.admitted, said)
        yield self._flow("s", "task", group.task, admission, group.admitted)
        for moment in (group.started, group.decoded, group.scored):
            yield self._flow("t", "task", group.task, place, moment)
        if step is not None:
            yield self._flow("f", "task", group.task, self._place("trainer steps", "steps"), step.formed)

    def _step(self, step: Step) -> Iterator[Event]:
        said = {"version": step.version, "rollouts": step.rollouts, "reward": step.reward, "lag": dict(step.lags)}
        yield self._slice(self._place("trainer steps", "steps"), f"step {step.step}", step.formed, step.end, said)

    def _weights(self, publishes: Iterable[Publish], swaps: Iterable[Swap]) -> Iterator[Event]:
        place = self._place("trainer steps", _VERSIONS)
        known = {publish.version: publish for publish in publishes}
        for version, made in known.items():
            yield self._slice(place, f"publish {version}", made.begin, made.end, {"nbytes": made.nbytes})
        for swap in swaps:
            there = self._place(f"{swap.producer} {_IN_PLAY}", _VERSIONS)
            said = {"version": swap.version, "nbytes": swap.nbytes, "latency_s": swap.latency_s}
            yield self._slice(there, f"transfer {swap.version}", swap.arrived, swap.begin, said)
            yield self._slice(there, f"swap {swap.version}", swap.begin, swap.end, said)
            if publish := known.get(swap.version):
                name = f"{swap.version} to {swap.producer}"
                yield self._flow("s", "version", name, place, publish.begin)
                yield self._flow("f", "version", name, there, swap.begin)

    def _place(self, process: str, track: str) -> tuple[int, int]:
        """Numbers of a process and of a track of it, named at their first use."""
        if process not in self._processes:
            self._processes[process] = len(self._processes) + 1
            self._named.append(self._name("process_name", self._processes[process], 0, process))
        pid = self._processes[process]
        if (process, track) not in self._tracks:
            self._tracks[process, track] = len(self._tracks) + 1
            self._named.append(self._name("thread_name", pid, self._tracks[process, track], track))
        return pid, self._tracks[process, track]

    def _name(self, what: str, pid: int, tid: int, name: str) -> Event:
        return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}

    def _slice(self, place: tuple[int, int], name: str, begin: float, end: float, said: dict[str, Any]) -> Event:
        micro = self._micro(begin)
        return {
            "ph": "X",
            "name": name,
            "cat": "phase",
            "pid": place[0],
            "tid": place[1],
            "ts": micro,
            "dur": max(1, self._micro(end) - micro),
            "args": said,
        }

    def _flow(self, ph: str, category: str, name: str, place: tuple[int, int], moment: float) -> Event:
        ends = {"bp": "e"} if ph == "f" else {}
        where = {"pid": place[0], "tid": place[1], "ts": self._micro(moment)}
        return {"ph": ph, "cat": category, "name": category, "id": f"{category} {name}", **where, **ends}

    def _micro(self, moment: float) -> int:
        return round((moment - self._origin) * 1e6)


def _within(event: Event, origin: float, first: float, last: float) -> bool:
    if event["ph"] == "M":
        return True
    begin: float = origin + event["ts"] / 1e6
    end: float = begin + event.get("dur", 0) / 1e6
    return begin <= last and end >= first


def _whole_flows(events: list[Event]) -> list[Event]:
    """Without arrows of which the window cut off an end: a viewer draws those to nowhere."""
    ends: dict[str, set[str]] = {}
    for event in events:
        if event["ph"] in "stf":
            ends.setdefault(event["id"], set()).add(event["ph"])
    return [event for event in events if event["ph"] not in "stf" or {"s", "f"} <= ends[event["id"]]]
