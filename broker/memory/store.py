"""All that the memory broker knows of one run. Synchronous: every method is one step, as a script is on Redis."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from broker.api import Order, Peer, Published, Reign, RunRecord, RunState
from broker.arrivals import Arrival
from broker.bounds import (
    KEEP_PUBLISHED,
    KEEP_SETTLED,
    MAX_DEAD,
    MAX_DEAD_BYTES,
    MAX_ORDERS,
    MAX_REASONS,
    MAX_STEPS,
    SECRET_BYTES,
)
from broker.leases import Taken
from broker.looks import DeadLetter
from broker.messages import StepEntry, StepRecord, Task
from headrace.version import PolicyVersion

T = TypeVar("T")
NOBODY = "-"
"""Holds what a process of an earlier life held; it has no heartbeat."""


def now_ms() -> int:
    return time.time_ns() // 1_000_000


@dataclass(slots=True)
class TaskEntry:
    taken: Taken
    """As of its last delivery."""
    consumer: str = ""
    """Empty until it is delivered."""


@dataclass(slots=True)
class GroupEntry:
    arrival: Arrival
    consumer: str = ""
    settled: bool = False


@dataclass(frozen=True, slots=True)
class Dead:
    letter: DeadLetter
    producer: str


@dataclass(frozen=True, slots=True)
class Open:
    """Where the one entry of an admitted, unsettled task is: "t" in tasks, "g" in groups."""

    kind: str
    where: str
    entry_id: str


@dataclass(slots=True)
class RunStore:
    """Entries are in the order of their ids, which count up."""

    record: RunRecord
    state: RunState = field(default_factory=lambda: RunState("running"))
    nonce: str = ""
    gone: bool = False
    tasks: dict[str, TaskEntry] = field(default_factory=dict)
    groups: dict[str, GroupEntry] = field(default_factory=dict)
    settled: deque[str] = field(default_factory=deque)
    open: dict[str, Open] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    published: OrderedDict[tuple[str, int], None] = field(default_factory=OrderedDict)
    dead: dict[str, Dead] = field(default_factory=dict)
    steps: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=MAX_STEPS))
    orders: deque[Order] = field(default_factory=lambda: deque(maxlen=MAX_ORDERS))
    peers: dict[str, tuple[int, Peer]] = field(default_factory=dict)
    beats: dict[str, int] = field(default_factory=dict)
    """Service to the end of its lease, in ms since the epoch."""
    head: PolicyVersion | None = None
    coming: PolicyVersion | None = None
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(SECRET_BYTES))
    pins: set[PolicyVersion] = field(default_factory=set)
    reigns: dict[int, Reign] = field(default_factory=dict)
    manifests: dict[PolicyVersion, bytes] = field(default_factory=dict)
    leases: dict[tuple[PolicyVersion, str], int] = field(default_factory=dict)
    places: dict[tuple[str, str], int] = field(default_factory=dict)
    """Device and who stands in line for it, in order, to the end of the lease."""
    _last_id: int = 0
    _waiting: set[asyncio.Event] = field(default_factory=set)

    def new_id(self) -> str:
        """As in Redis: the time in milliseconds, but always later than the one before."""
        self._last_id = max(self._last_id + 1, int(time.time() * 1000))
        return f"{self._last_id}-0"

    async def wait(self, ready: Callable[[], T], block_ms: float) -> T:
        """What `ready` answers as soon as that is something, at the latest after `block_ms`."""
        end = time.monotonic() + block_ms / 1000
        while True:
            answer = ready()
            left = end - time.monotonic()
            if answer or self.gone or left <= 0:
                return answer
            changed = asyncio.Event()
            self._waiting.add(changed)
            try:
                # Not asyncio.wait_for, which loses a cancellation that comes together with the event (Python 3.11).
                async with asyncio.timeout(left):
                    await changed.wait()
            except TimeoutError:
                return ready()
            finally:
                self._waiting.discard(changed)

    def wake(self) -> None:
        """Something was added: whoever waits looks again."""
        for changed in self._waiting:
            changed.set()

    def alive(self, name: str) -> bool:
        return self.beats.get(name, 0) > now_ms()

    def line(self, device: str, holder: str = "") -> tuple[str, ...]:
        """Who stands in line for a device; of others than `holder` only those whose lease runs."""
        now = now_ms()
        self.places = {place: end for place, end in self.places.items() if end > now or place == (device, holder)}
        return tuple(name for at, name in self.places if at == device)

    def admit(self, tasks: Iterable[tuple[Task, bytes]]) -> None:
        for task, body in tasks:
            if task.task_id in self.open:
                continue
            self._add_task(Taken(self.new_id(), "0", 0, task.task_id, task.kind, body))
            self.counts[f"{task.kind} admitted"] += 1
        self.wake()

    def take(self, producer: str, count: int) -> list[Taken]:
        """Tasks of consumers without heartbeat in the order of their names, then new ones."""
        holders = sorted({entry.consumer for entry in self.tasks.values()} - {"", producer})
        lapsed = [name for name in holders if not self.alive(name)]
        found: list[TaskEntry] = []
        for name in [*lapsed, ""]:
            found += [entry for entry in self.tasks.values() if entry.consumer == name][: count - len(found)]
        for entry in found:
            entry.consumer = producer
            old = entry.taken
            entry.taken = Taken(old.entry_id, old.attempts_before, old.deliveries + 1, old.task_id, old.kind, old.body)
        return [entry.taken for entry in found]

    def holds(self, producer: str, entry_id: str) -> TaskEntry | None:
        entry = self.tasks.get(entry_id)
        return entry if entry is not None and entry.consumer == producer else None

    def publish(self, producer: str, entry_id: str, arrival: Arrival) -> Published:
        attempt = (arrival.task_id, int(arrival.attempt))
        entry = self.holds(producer, entry_id)
        if entry is None or (entry.taken.task_id, _attempt(entry.taken)) != attempt:
            return "repeated" if attempt in self.published else "superseded"
        del self.tasks[entry_id]
        self._add_group(arrival)
        self.published[attempt] = None
        if len(self.published) > KEEP_PUBLISHED:
            self.published.popitem(last=False)
        return "published"

    def give_back(self, producer: str, entry_id: str) -> None:
        entry = self.holds(producer, entry_id)
        if entry is None:
            return
        old = self.tasks.pop(entry_id).taken
        self._add_task(Taken(self.new_id(), str(_attempt(old)), 0, old.task_id, old.kind, old.body))
        self.wake()

    def bury_task(self, producer: str, entry_id: str, reason: str) -> None:
        entry = self.holds(producer, entry_id)
        if entry is None:
            return
        taken = self.tasks.pop(entry_id).taken
        attempt = str(_attempt(taken))
        self._add_dead("tasks", reason, Arrival(entry_id, taken.task_id, attempt, taken.kind, producer, taken.body))
        self._add_group(Arrival(self.new_id(), taken.task_id, attempt, taken.kind, producer, b"", dead=reason))

    def take_groups(self, consumer: str, count: int) -> list[Arrival]:
        """Those that another trainer's consumer holds first, then new ones."""
        unsettled = [entry for entry in self.groups.values() if not entry.settled]
        found = [entry for entry in unsettled if entry.consumer not in ("", consumer)]
        found += [entry for entry in unsettled if not entry.consumer][: max(0, count - len(found))]
        for entry in found:
            entry.consumer = consumer
        return [entry.arrival for entry in found]

    def replay(self, dead: Dead) -> None:
        """Put it back where it came from; its task is admitted anew."""
        letter = dead.letter
        del self.dead[letter.letter_id]
        if letter.source == "tasks":
            self._add_task(Taken(self.new_id(), letter.attempt, 0, letter.task_id, letter.kind, letter.body))
            self.wake()
        else:
            who = letter.task_id, letter.attempt, letter.kind, dead.producer
            self._add_group(Arrival(self.new_id(), *who, letter.body))
        self.counts[f"{letter.kind} admitted"] += 1

    def open_groups(self, consumer: str) -> list[Arrival]:
        held = [entry for entry in self.groups.values() if entry.consumer and not entry.settled]
        for entry in held:
            entry.consumer = consumer
        return [entry.arrival for entry in held]

    def bury_group(self, arrival: Arrival, reason: str) -> bool:
        """True when this was the open group of its task, which is then counted as dead."""
        if self.groups.pop(arrival.entry_id, None) is None:
            return False
        if not arrival.dead:
            self._add_dead("groups", reason, arrival)
        return self._count(StepEntry(arrival.entry_id, arrival.task_id, "dead", reason))

    def settle(self, entry: StepEntry) -> None:
        known = self.open.get(entry.task_id)
        if not entry.entry_id and known:
            entry = StepEntry(known.entry_id, entry.task_id, entry.verdict, entry.reason)
            self.tasks.pop(known.entry_id, None)
        group = self.groups.get(entry.entry_id)
        if group is not None and not group.consumer:
            # Nobody has read it, and nobody shall.
            del self.groups[entry.entry_id]
        elif group is not None and not group.settled:
            group.settled = True
            self.settled.append(entry.entry_id)
            while len(self.settled) > KEEP_SETTLED:
                del self.groups[self.settled.popleft()]
        self._count(entry)

    def outstanding(self) -> Counter[str]:
        """Tasks whose entry is there, by kind, counted from the streams."""
        waiting = {(entry.taken.task_id, entry_id) for entry_id, entry in self.tasks.items()}
        waiting |= {(entry.arrival.task_id, entry_id) for entry_id, entry in self.groups.items() if not entry.settled}
        return Counter(known.kind for task_id, known in self.open.items() if (task_id, known.entry_id) in waiting)

    def _add_task(self, taken: Taken) -> None:
        self.tasks[taken.entry_id] = TaskEntry(taken)
        self.open[taken.task_id] = Open(taken.kind, "t", taken.entry_id)

    def _add_group(self, arrival: Arrival) -> None:
        self.groups[arrival.entry_id] = GroupEntry(arrival)
        self.open[arrival.task_id] = Open(arrival.kind, "g", arrival.entry_id)
        self.wake()

    def _add_dead(self, source: Literal["tasks", "groups"], reason: str, was: Arrival) -> None:
        body, digest = was.body[:MAX_DEAD_BYTES], hashlib.sha256(was.body).hexdigest()
        letter = DeadLetter(
            self.new_id(), source, was.task_id, was.attempt, was.kind, reason, digest, len(was.body), body
        )
        self.dead[letter.letter_id] = Dead(letter, was.producer)
        if len(self.dead) > MAX_DEAD:
            del self.dead[next(iter(self.dead))]

    def _count(self, entry: StepEntry) -> bool:
        known = self.open.get(entry.task_id)
        if known is None or known.entry_id != entry.entry_id:
            return False
        del self.open[entry.task_id]
        self.counts[f"{known.kind} v {entry.verdict}"] += 1
        if entry.reason:
            name = f"{known.kind} r {entry.verdict}: {entry.reason}"
            if name not in self.counts and len(self.counts) >= MAX_REASONS:
                name = f"{known.kind} r {entry.verdict}: other reasons"
            self.counts[name] += 1
        return True


def _attempt(taken: Taken) -> int:
    return int(taken.attempts_before) + taken.deliveries
