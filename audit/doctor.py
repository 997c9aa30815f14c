"""What a doctor says of a live run: who waits on whom, since when and for which id, and what is not as it should be.

Pure; `deploy/doctor.py` asks the broker and reads the ends of the journals.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from broker.api import Peer, RunState
from broker.looks import OpenTask, QueueDepths

Grade = Literal["fault", "slow", "fine"]

SILENT_S = 5.0
"""A living service whose lanes were not written for so long stands still: they are written once a second."""
STUCK_S = 20.0
"""An engine that has full slots and made no token for so long is stuck."""
SKEW_S = 0.5
"""Between clocks, from which on deadlines and latencies are off."""
LOOP_LAG_S = 0.5
"""How late an event loop may wake up: leases are renewed by it."""
NEARLY_FULL = 0.9
"""Of Redis's memory."""
PATIENCE_S = 10.0
"""Waits that are shorter are a pipeline's breath."""
MOST_IDS = 3

WAITS: Mapping[str, tuple[str, str]] = {
    "wait_groups": ("groups", "the producers"),
    "wait_evaluation": ("evaluations", "the producers"),
    "wait_checkpoint": ("room on the disk for a checkpoint", "the disk"),
    "wait_start": ("its first weights", "the trainer"),
    "wait_order": ("what to do next", "rank 0 of its trainer"),
    "wait_no_task": ("a task", "admission"),
    "wait_backpressure": ("a task", "the trainer, which is behind with what is finished"),
    "wait_scores": ("scores", "its reward processes"),
    "wait_behind_on_weights": ("newer weights", "its transfer"),
    "wait_environment": ("the next turn", "its environments"),
    "wait_broker": ("the broker", "Redis"),
    "wait_device": ("the device", "others that have their turn on it"),
    "wait_servers": ("a server that answers", "its servers"),
    "wait_drain": ("the end of what it plays", "its rollouts"),
}
"""Phase to what is waited for, and on whom."""


@dataclass(frozen=True, slots=True)
class Standing:
    """A lane as its journal says."""

    phase: str
    since: float
    """When the phase began; seconds on the broker's clock."""
    written: float
    """Up to when the lane is recorded."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Of an engine that has sequences in its slots."""

    since: float
    """When its newest token was counted, at the latest."""
    busy_slots: int


@dataclass(frozen=True, slots=True)
class Seen:
    """All that was looked at. Times are seconds on the broker's clock."""

    run: str
    folder: str
    """Of the run, on the trainer's host."""
    now: float
    state: RunState
    peers: tuple[Peer, ...]
    depths: QueueDepths
    tasks: tuple[OpenTask, ...] = ()
    """The oldest without a group."""
    memory: tuple[int, int] = (0, 0)
    refusal: str = ""
    max_lag: int = 0
    head: str = ""
    unbalanced: tuple[str, ...] = ()
    """Kinds of tasks whose balance sheet does not close."""
    skew_s: float = 0.0
    """This machine's clock minus the broker's."""
    lanes: Mapping[tuple[str, str], Standing] = field(default_factory=dict)
    """By service and lane; empty where the run's folder is on another machine."""
    progress: Mapping[str, Progress] = field(default_factory=dict)
    offsets: Mapping[str, float] = field(default_factory=dict)
    """Service to the broker's clock minus its own."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Who waits for what, on whom, since when, and for which ids."""

    who: str
    what: str
    whom: str
    for_s: float | None
    """None where it is not known since when."""
    ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Finding:
    grade: Grade
    sentence: str
    command: str
    """The next one to type."""


def waits(seen: Seen) -> list[Wait]:
    """Of all living services that wait."""
    found = []
    for peer in sorted(_alive(seen), key=lambda peer: peer.name):
        phase, since = _phase(seen, peer)
        if phase in WAITS:
            what, whom = WAITS[phase]
            ids, holders = _ids(seen, peer, phase)
            for_s = None if since is None else max(0.0, seen.now - since)
            found.append(Wait(peer.name, what, holders or whom, for_s, ids))
    return found


def findings(seen: Seen) -> list[Finding]:
    """What is not as it should be, faults first."""
    order: list[Grade] = ["fault", "slow", "fine"]
    found = [
        *_missing(seen),
        *_troubles(seen),
        *_stalled(seen),
        *_behind(seen),
        *_held_up(seen),
        *_letters(seen),
        *_clocks(seen),
        *_loops(seen),
        *_memory(seen),
    ]
    return sorted(found, key=lambda finding: order.index(finding.grade))


def _alive(seen: Seen) -> list[Peer]:
    return [peer for peer in seen.peers if peer.alive]


def _phase(seen: Seen, peer: Peer) -> tuple[str, float | None]:
    """What a service as a whole does, and since when."""
    lane = {"producer": "host", "trainer": "trainer"}.get(peer.role, "")
    standing = seen.lanes.get((peer.name, lane))
    if standing is not None:
        return standing.phase, standing.since
    # Its journal is on another machine: what its heartbeat said.
    return str(peer.state.get("phase") or ""), None


def _ids(seen: Seen, peer: Peer, phase: str) -> tuple[tuple[str, ...], str]:
    """The ids that a wait is for, and who has them."""
    if phase in ("wait_groups", "wait_evaluation"):
        kind = "train" if phase == "wait_groups" else "eval"
        tasks = [task for task in seen.tasks if task.kind == kind]
        shown = tuple(f"task {task.task_id}, {_who(task)}, {_age(seen, task)}" for task in tasks[:MOST_IDS])
        return shown, ", ".join(dict.fromkeys(task.holder for task in tasks if task.holder))
    if phase in ("wait_start", "wait_behind_on_weights") and seen.head:
        return (f"version {seen.head}",), ""
    if phase in ("wait_scores", "wait_backpressure"):
        mine = [task for task in seen.tasks if task.holder == peer.name]
        return tuple(f"task {task.task_id}, {_age(seen, task)}" for task in mine[:MOST_IDS]), ""
    return (), ""


def _who(task: OpenTask) -> str:
    return f"with {task.holder}" if task.holder else "taken by nobody"


def _age(seen: Seen, task: OpenTask) -> str:
    return f"admitted {ago(seen.now - task.admitted_ms / 1000)} ago"


def ago(seconds: float) -> str:
    """ "0.4 s", "12 s", "5 min"."""
    if seconds < 10:
        return f"{max(0.0, seconds):.1f} s"
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _missing(seen: Seen) -> Iterator[Finding]:
    if seen.refusal:
        yield Finding("fault", f"{seen.refusal}: no heartbeat passes, so that nobody can be seen", "df -h; free -h")
        return
    alive = {peer.role for peer in _alive(seen)}
    if seen.state.status in ("finished", "failed"):
        why = f": {seen.state.reason}" if seen.state.reason else ""
        yield Finding("fine", f"the run is {seen.state.status}{why}", f"headrace audit {seen.run}")
        return
    if not alive:
        yield Finding("fault", "no service is alive", f"headrace up --resume --run {seen.run}")
        return
    if "trainer" not in alive:
        yield Finding(
            "fault", "no trainer is alive: groups wait, and nothing is trained", f"headrace status --run {seen.run}"
        )
    if "producer" not in alive:
        yield Finding(
            "fault", "no producer is alive: nothing is generated", f"headrace scale producer 1 --run {seen.run}"
        )
    for peer in seen.peers:
        if not peer.alive:
            yield Finding("slow", f"{peer.name} fell silent", _log(seen, peer.name))


def _troubles(seen: Seen) -> Iterator[Finding]:
    for peer in _alive(seen):
        rows = peer.state.get("troubles")
        for row in rows if isinstance(rows, list) else ():
            if isinstance(row, dict) and row.get("reason"):
                since = _number(row.get("since"))
                held = f", for {ago(seen.now - since)}" if since else ""
                yield Finding("fault", f"{peer.name}{held}: {row['reason']}", _log(seen, peer.name))
    for kind in seen.unbalanced:
        yield Finding("fault", f"the balance sheet of {kind} tasks does not close", f"headrace status --run {seen.run}")


def _stalled(seen: Seen) -> Iterator[Finding]:
    alive = {peer.name for peer in _alive(seen)}
    silent: dict[str, float] = {}
    for (service, _), standing in seen.lanes.items():
        if service in alive:
            silent[service] = min(silent.get(service, float("inf")), seen.now - standing.written)
    for service, seconds in silent.items():
        if seconds > SILENT_S:
            sentence = f"{service} has recorded nothing for {ago(seconds)}: its process is stopped, or its disk is full"
            yield Finding("fault", sentence, _log(seen, service))
    for producer, progress in seen.progress.items():
        stuck = seen.now - progress.since
        if producer in alive and progress.busy_slots and stuck > STUCK_S:
            sentence = f"{producer} made no token for {ago(stuck)}, with {progress.busy_slots} sequences in its slots"
            yield Finding("fault", sentence, _log(seen, producer))


def _behind(seen: Seen) -> Iterator[Finding]:
    for peer in _alive(seen):
        _, _, step = str(peer.state.get("version") or "").partition(".")
        if peer.role == "producer" and step.isdigit():
            lag = seen.state.step - int(step)
            if lag > max(1, seen.max_lag):
                sentence = (
                    f"{peer.name} is {lag} versions behind; staleness.max_lag = {seen.max_lag} lets it start no task"
                )
                yield Finding("slow", sentence, f"headrace weights list --run {seen.run}")


def _held_up(seen: Seen) -> Iterator[Finding]:
    """Waits that are long."""
    for wait in waits(seen):
        if wait.for_s is None or wait.for_s < PATIENCE_S:
            continue
        ids = f" ({'; '.join(wait.ids)})" if wait.ids else ""
        sentence = f"{wait.who} waits for {wait.what} on {wait.whom}, for {ago(wait.for_s)}{ids}"
        yield Finding("slow", sentence, _command(seen, wait))


def _command(seen: Seen, wait: Wait) -> str:
    if wait.what in ("groups", "evaluations") and not any(task.holder for task in seen.tasks) and seen.tasks:
        producers = sum(peer.role == "producer" for peer in _alive(seen))
        return f"headrace scale producer {producers + 1} --run {seen.run}"
    if wait.what in ("newer weights", "its first weights"):
        return f"headrace weights list --run {seen.run}"
    if wait.what == "room on the disk for a checkpoint":
        return f"df -h {seen.folder}"
    return f"headrace audit {seen.run}"


def _letters(seen: Seen) -> Iterator[Finding]:
    if seen.depths.dead:
        letters = "1 dead letter" if seen.depths.dead == 1 else f"{seen.depths.dead} dead letters"
        yield Finding("slow", f"{letters}: entries that nobody could use", f"headrace dead list --run {seen.run}")


def _clocks(seen: Seen) -> Iterator[Finding]:
    clocks = {"this machine": -seen.skew_s, **seen.offsets}
    for who, offset in clocks.items():
        if abs(offset) > SKEW_S:
            side = "behind" if offset > 0 else "ahead of"
            sentence = (
                f"the clock of {who} is {ago(abs(offset))} {side} the broker's: deadlines and latencies are off by that"
            )
            yield Finding("slow", sentence, "timedatectl status")


def _loops(seen: Seen) -> Iterator[Finding]:
    for peer in _alive(seen):
        lag = _number(peer.state.get("event_loop_lag_s"))
        if lag > LOOP_LAG_S:
            sentence = (
                f"the event loop of {peer.name} woke up {ago(lag)} late: something in it blocks, or its core is shared"
            )
            yield Finding("slow", sentence, f"top -H -p {peer.pid}")


def _memory(seen: Seen) -> Iterator[Finding]:
    used, limit = seen.memory
    if limit and used >= NEARLY_FULL * limit:
        sentence = f"Redis uses {used >> 20} MiB of its maxmemory of {limit >> 20} MiB: when it is full, producers wait"
        yield Finding("slow", sentence, "redis-cli CONFIG SET maxmemory BYTES")


def _log(seen: Seen, service: str) -> str:
    """Where a service that the launcher started prints."""
    return f"tail {seen.folder}/logs/{service}.log"


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
