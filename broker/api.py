"""What each role may ask of the broker. Redis (`broker/redis/`) and memory (`broker/memory/`) pass the same tests.

All methods are coroutines; they raise BrokerUnavailable after the configured time without a connection, and
Fenced where a newer trainer has taken the run. Every method of one protocol is for one run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from broker.looks import DeadLetter, OpenTask, QueueDepths
from broker.messages import Group, GroupDelivery, StepEntry, StepRecord, Task, TaskDelivery, TaskKind
from headrace.version import PolicyVersion

RunStatus = Literal["running", "stopping", "finished", "failed"]
Published = Literal["published", "repeated", "superseded"]


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What a run is, written before any service starts. A producer whose digests or schema differ is refused."""

    run_id: str
    schema: int
    config: dict[str, Any]
    """The resolved configuration tree, JSON-able."""
    digests: dict[str, str]
    """"model", "tokenizer", "chat_template"."""
    vocab_size: int
    created_ms: int = 0
    folder: str = ""
    """The run's folder on the machine of the trainer."""
    dataset_sizes: dict[str, int] = field(default_factory=dict)
    """"train/<environment>" and "eval/<environment>" to the number of indices that a task may name."""


@dataclass(frozen=True, slots=True)
class Fence:
    """The right to change a run: every script of the trainer compares both."""

    incarnation: int
    nonce: str


@dataclass(frozen=True, slots=True)
class RunState:
    """Where a run is now."""

    status: RunStatus
    reason: str = ""
    incarnation: int = 0
    step: int = 0
    """Newest trainer step."""
    cursor: int = 0
    """Number of the next training task, as the trainer said it with its newest admission."""


@dataclass(frozen=True, slots=True)
class Hello:
    """What a producer says when it joins."""

    producer: str
    schema: int
    digests: dict[str, str]
    host: str
    pid: int
    metrics_url: str = ""


@dataclass(frozen=True, slots=True)
class Peer:
    """A service as the broker knows it: alive while its heartbeat's lease lasts."""

    name: str
    role: Literal["producer", "trainer", "weights", "launcher", "rank"]
    """A "rank" is one of the trainer's beside rank 0, which is the trainer."""
    host: str
    pid: int
    alive: bool
    state: dict[str, Any]
    """What its last heartbeat said: version, busy slots, tokens per second, idle fraction, metrics_url, …"""


@dataclass(frozen=True, slots=True)
class Order:
    """Something the operator or the trainer wants of services: an entry on stream `orders`."""

    order_id: str
    kind: Literal["scale", "drain", "stop", "end", "rollback"]
    target: str = ""
    """A service's name; empty is all. Of a rollback: the version to go back to."""
    count: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Balance:
    """`admitted` equals the sum of the rest; `outstanding` is counted from streams and pending lists."""

    kind: TaskKind
    admitted: int
    outstanding: int
    verdicts: dict[str, int]
    reasons: dict[str, int] = field(default_factory=dict)
    """"verdict: reason" to count, where a reason was given."""

    @property
    def closed(self) -> bool:
        return self.admitted == self.outstanding + sum(self.verdicts.values())


@dataclass(frozen=True, slots=True)
class Reign:
    """The steps of one incarnation: which versions there ever were, and where histories forked."""

    first: int
    """Step of its first published version: where it went on from."""
    newest: int
    """Step of its newest published version."""


class ServicePort(Protocol):
    """What every service of a run uses."""

    async def record(self) -> RunRecord:
        """Raises Refused for a run that is not there."""
        ...

    async def state(self) -> RunState: ...

    async def now_ms(self) -> int:
        """The broker's clock, milliseconds since the epoch: that of every deadline."""
        ...

    async def heartbeat(self, peer: Peer, lease_s: float) -> None: ...

    async def retire(self, name: str) -> None:
        """This service left on purpose: forget its heartbeat."""
        ...

    async def peers(self) -> list[Peer]: ...

    async def orders(self, after: str, block_ms: int) -> list[Order]:
        """Orders after the given id ("$" for only new ones at the first call), waiting at most `block_ms`."""
        ...

    async def order(self, order: Order) -> None: ...

    async def line_up(self, device: str, holder: str, lease_s: float) -> tuple[str, ...]:
        """Stand in line for a device, or keep one's place: who stands there, in order. The first has the device.

        A place that is not kept for `lease_s` is lost to those behind it. `device` and `holder` are without blanks; a
        holder is one process, for good.
        """
        ...

    async def step_aside(self, device: str, holder: str) -> tuple[str, ...]:
        """Give one's place up, where there is one."""
        ...

    async def wait_line(self, device: str, seen: tuple[str, ...], block_ms: int) -> tuple[str, ...]:
        """The line as soon as it is another one than was seen, else the same after `block_ms`."""
        ...

    def watch(self, on_outage: Callable[[str], None]) -> None:
        """Be told why calls to the broker wait, once they have for a second, and "" when it answers again."""
        ...

    def hasten(self) -> None:
        """The service is leaving: from now on a broker that is away is given up after `connect_timeout_s`."""
        ...

    async def close(self) -> None: ...


class ProducerPort(ServicePort, Protocol):
    async def join(self, hello: Hello) -> None:
        """Register. Raises Refused with the difference named when digests or schema are not the run's."""
        ...

    async def take(self, producer: str, count: int, block_ms: int) -> list[TaskDelivery]:
        """At most `count` tasks, those of dead producers first. A task over its delivery limit goes to `dead`.

        One whose deadline has passed is published as a failed group at once, and not returned.
        """
        ...

    async def renew(self, producer: str, entry_ids: list[str]) -> list[str]:
        """Keep holding these; returns the ids that are no longer this producer's."""
        ...

    async def publish(self, producer: str, delivery: TaskDelivery, group: Group) -> Published:
        """One script: add the group, then acknowledge the task. Repeating it is harmless."""
        ...

    async def give_back(self, producer: str, entry_ids: list[str]) -> None:
        """A draining producer returns tasks it did not finish: they are delivered to others at once."""
        ...


class TrainerPort(ServicePort, Protocol):
    async def take_fence(self, newest_checkpoint: int) -> Fence:
        """Become the run's trainer, of incarnation max(broker, newest of the run's folder) + 1.

        Older ones are fenced from now on. A run that had ended is running again.
        """
        ...

    async def admit(self, fence: Fence, tasks: list[Task], cursor: int | None = None) -> None:
        """Tasks that are outstanding already are left out. `cursor` is kept in the run's state."""
        ...

    async def reigns(self) -> dict[int, Reign]:
        """Incarnations to their published steps, the newest `bounds.MAX_REIGNS` of them."""
        ...

    @property
    def mended(self) -> int:
        """How often this port has seen Redis come back (restarted or emptied) and put right what it had lost.

        Tasks that had vanished are counted as lost and admitted anew by then. Each time the trainer should take a
        checkpoint, since the step log may lack its end, and publish its newest version again.
        """
        ...

    async def take_groups(self, fence: Fence, count: int, block_ms: int) -> list[GroupDelivery]:
        """New groups, validated; each is the one group that its task waits for.

        What is invalid (or a task that was delivered too often, or a group that no task waits for) is already in
        `dead` and settled. Where it was the only group of its task, it comes with outcome "dead" and no trajectories,
        so that the task's slot is seen to be free; settling it again changes nothing. So does, with outcome "lost",
        one that Redis lost together with the trainer that had it.
        """
        ...

    async def open_groups(self, fence: Fence) -> list[GroupDelivery]:
        """Deliveries that an earlier trainer left unacknowledged, in order."""
        ...

    async def overdue(self, by_ms: int) -> list[Task]:
        """Tasks without a group whose deadline passed longer ago than this, on the broker's clock."""
        ...

    async def append_step(self, fence: Fence, record: StepRecord) -> None: ...

    async def steps_after(self, step: int) -> list[StepRecord]: ...

    async def settle(self, fence: Fence, entries: list[StepEntry]) -> None:
        """Acknowledge and delete these groups, close their tasks and count the verdicts.

        A task counts once, however often asked. Whatever entry it has now goes too: with an empty entry id a task
        that waits, or the second group of one whose first was lost by Redis.
        """
        ...

    async def set_step(self, fence: Fence, step: int) -> None: ...

    async def finish(self, fence: Fence, status: RunStatus, reason: str) -> None:
        """Set the run's status and tell everybody with an "end" order."""
        ...


@dataclass(frozen=True, slots=True)
class Versions:
    """Weight versions by how far they are."""

    head: PolicyVersion | None = None
    """The newest sealed one."""
    coming: PolicyVersion | None = None
    """The newest one that was begun; perhaps the head itself, or one that was given up."""


class WeightsPort(ServicePort, Protocol):
    async def publish_head(self, fence: Fence, version: PolicyVersion, manifest: bytes) -> None:
        """Store the sealed manifest and move the head to it, if it is newer. Notifies `wait_head`."""
        ...

    async def announce(self, fence: Fence, version: PolicyVersion, manifest: bytes) -> None:
        """Store the manifest of a version that is being published, and tell `wait_versions` that it comes."""
        ...

    async def secret(self) -> bytes:
        """The run's shared secret [32 bytes], made at the first call; another one in a Redis that lost it."""
        ...

    async def head(self) -> PolicyVersion | None: ...

    async def wait_versions(self, seen: Versions, block_ms: int) -> Versions:
        """As soon as they are other ones than those that were seen, else the same after `block_ms`."""
        ...

    async def wait_head(self, after: PolicyVersion | None, block_ms: int) -> PolicyVersion | None:
        """The head as soon as it is newer than `after`, else what it is after `block_ms`."""
        ...

    async def manifest(self, version: PolicyVersion) -> bytes | None: ...

    async def versions(self) -> set[PolicyVersion]: ...

    async def lease(self, version: PolicyVersion, holder: str, lease_s: float) -> None:
        """`holder` reads this version; it is not freed while the lease lasts."""
        ...

    async def release(self, version: PolicyVersion, holder: str) -> None: ...

    async def leased(self) -> dict[PolicyVersion, list[str]]:
        """Versions with live leases and their holders."""
        ...

    async def pin(self, version: PolicyVersion) -> None:
        """Keep this version until it is let go. Raises Refused beyond `bounds.MAX_PINS`.

        What the trainer has pinned is pinned again in a Redis that came back without it, before there is a head.
        """
        ...

    async def unpin(self, version: PolicyVersion) -> bool:
        """False when it was not pinned."""
        ...

    async def pinned(self) -> set[PolicyVersion]: ...

    async def forget(self, version: PolicyVersion) -> None:
        """Drop the manifest of a freed version."""
        ...


class OperatorPort(ServicePort, Protocol):
    """What the command line uses."""

    async def balance(self) -> list[Balance]: ...

    async def depths(self) -> QueueDepths: ...

    async def oldest_tasks(self, count: int) -> list[OpenTask]:
        """At most `count` tasks without a group, the oldest first."""
        ...

    async def memory(self) -> tuple[int, int]:
        """Bytes that the broker uses, of all its runs, and its limit; 0 where there is none, or it does not say."""
        ...

    async def refusal(self) -> str:
        """Why the broker takes no heartbeats now, as a sentence; empty while it does."""
        ...

    async def set_status(self, status: RunStatus, reason: str) -> None: ...

    async def finished(self, after: str, block_ms: int) -> list[tuple[str, GroupDelivery, str]]:
        """Groups as they come, for a person to read, without taking them: (cursor, group, producer).

        `after` is "" from the oldest that is left, "$" for only new ones at the first call, else the last cursor.
        """
        ...

    async def dead(self, after: str, count: int) -> list[DeadLetter]:
        """At most `count` letters after the id, the oldest first ("" from the beginning), without bodies."""
        ...

    async def dead_letter(self, letter_id: str) -> DeadLetter:
        """One with its body. Raises Refused for an id that is not there."""
        ...

    async def replay_dead(self, letter_id: str) -> None:
        """Put it back as it was, as a task that is admitted anew; it leaves `dead`.

        Raises Refused when it is not there, was cut at `bounds.MAX_DEAD_BYTES`, or its task is outstanding again.
        """
        ...

    async def drop_dead(self, letter_ids: list[str]) -> int:
        """Forget these; returns how many there were."""
        ...


class Runs(Protocol):
    """All runs of one broker."""

    async def ping(self) -> None:
        """Raises BrokerUnavailable with host and port (never a secret) after the configured time."""
        ...

    async def create(self, record: RunRecord) -> None:
        """Raises Refused when the id is taken."""
        ...

    async def amend(self, record: RunRecord) -> None:
        """Replace a run's record, before the services that go on with it start. Raises Refused for an unknown run."""
        ...

    async def ids(self) -> list[str]: ...

    async def delete(self, run_id: str) -> int:
        """Delete every key of the run; returns how many."""
        ...

    async def close(self) -> None: ...
