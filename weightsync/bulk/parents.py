"""Whom a download asks: connections that all downloads share, and the next parent to try."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from headrace.errors import WeightError, WireError
from headrace.version import PolicyVersion
from weightsync.bulk.client import Cancellation, Connection
from weightsync.bulk.deltas import DeltaCache
from weightsync.bulk.frames import MAX_FAILED, MAX_PARENTS, Ask, Done
from weightsync.bulk.standing import Standing

log = logging.getLogger(__name__)

ASKS = 3
"""Times that the origin is asked for parents in one fetch."""
REFRESH_S = 10.0
"""So often the origin is told that this download goes on."""


@dataclass(frozen=True, slots=True)
class TcpStats:
    """Counters since start; a reader takes differences."""

    full_bytes: int = 0
    """Of full chunks that came."""
    delta_bytes: int = 0
    """Of deltas that came, as they went over the wire."""
    delta_chunks: int = 0
    bad_chunks: int = 0
    """What did not match what it should be; fetched again."""
    failures: int = 0
    """Peers that stalled, died, or sent what does not match."""


@dataclass
class Downloads:
    """What all downloads of a process share. Any thread."""

    addresses: Callable[[], Mapping[str, str]]
    """Hosts to the addresses of their bulk servers, as known now."""
    secret: bytes = field(repr=False)
    run_id: str
    name: str
    """Of who pulls; no two processes have the same."""
    host: str
    address: str = ""
    """Where others may have it from this process; empty where nobody can."""
    codec: str = "auto"
    """Of `weights.codec`."""
    deltas: DeltaCache | None = None
    """Where this process serves others: deltas that came need not be made for them."""
    connect_s: float = 2.0
    stall_s: float = 2.0
    patience_s: float = 30.0
    """A download is given up when nobody has had its part for so long."""
    standing: Standing = field(default_factory=Standing)
    stats: TcpStats = TcpStats()
    _idle: dict[str, Connection] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def same_host(self, host: str) -> bool:
        """On one host there is no wire to save."""
        return host == self.host

    def take(self, address: str) -> Connection | None:
        """An open connection that nobody uses."""
        with self._lock:
            connection = self._idle.pop(address, None)
        if connection is None or connection.fresh:
            return connection
        connection.close()
        return None

    def give_back(self, connection: Connection) -> None:
        """Everything that was asked on it is answered."""
        with self._lock:
            over = [idle for idle in self._idle.values() if idle.address == connection.address or not idle.fresh]
            for idle in over:
                del self._idle[idle.address]
            self._idle[connection.address] = connection
        for idle in over:
            idle.close()

    def count(self, **more: int) -> None:
        with self._lock:
            self.stats = replace(
                self.stats, **{name: getattr(self.stats, name) + count for name, count in more.items()}
            )

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, {}
        for connection in idle.values():
            connection.close()


class Parents:
    """Of one part of a version. For one thread at a time."""

    def __init__(
        self, shared: Downloads, version: PolicyVersion, part: int, host: str, cancellation: Cancellation
    ) -> None:
        """`host` published the part."""
        self._shared = shared
        self._version = version
        self._part = part
        self._host = host
        self._cancellation = cancellation
        self._candidates: deque[str] = deque()
        self._failed: dict[str, None] = {}
        """Who failed since the origin was told, in order."""
        self._asks = 0
        self._told = False
        """Whether the origin knows of this download."""
        self._asked = self._heard = time.monotonic()
        self._silent_until = 0.0
        """The origin did not answer, and is left alone for as long as it took."""
        self._reason = f"no weight service has said where it serves what lies on host {host}"
        self._origin_gone = self._heard_now = False
        self._origin = ""

    @property
    def origin(self) -> str:
        """Address of the host that published the part; empty where none was ever known, or it is this process's."""
        self._origin = self._shared.addresses().get(self._host, self._origin)
        return self._origin if self._origin != self._shared.address else ""

    def begin(self, parent: str) -> None:
        """A fetch begins; `parent` serves it, if any does."""
        self._asks = ASKS
        self._origin_gone = self._heard_now = False
        if parent and time.monotonic() - self._asked > REFRESH_S:
            self._ask(parent)

    def next(self) -> Connection | None:
        """An open connection to the next one to try; None when there is nobody now."""
        while not self._cancellation.asked:
            if not self._candidates:
                if self._asks == 0:
                    return None
                self._asks -= 1
                parents = self._ask("")
                self._candidates.extend(self._others() if parents is None else parents)
                if not self._candidates:
                    return None
            if connection := self._open(self._candidates.popleft()):
                return connection
        return None

    def again(self, address: str) -> None:
        """Try this one once more."""
        self._candidates.appendleft(address)

    def heard(self) -> None:
        """Somebody has the part, or will have it."""
        self._heard = time.monotonic()
        self._heard_now = True

    def failed(self, address: str, reason: str) -> None:
        """It stalled, died, or sent what does not match."""
        if self._cancellation.asked:
            # We did that ourselves.
            return
        log.info("weight version %s does not come from %s: %s", self._version, address, reason)
        self._reason = f"{address}: {reason}"
        self._failed[address] = None
        self._shared.count(failures=1)

    def gone(self, address: str) -> None:
        """It says that it does not have the part."""
        self._reason = f"{address} does not have it"
        self._failed[address] = None
        self._origin_gone = self._origin_gone or address == self.origin

    def nothing(self) -> str | None:
        """After a fetch without a chunk: why the part cannot be had any more, or None."""
        lost = (self._origin_gone or not self.origin) and not self._heard_now
        return self._reason if lost or time.monotonic() - self._heard > self._shared.patience_s else None

    def done(self, *, holds: bool) -> None:
        """Tell the origin that this download is over."""
        if not self._told or time.monotonic() < self._silent_until:
            return
        if (connection := self._open(self.origin)) is None:
            return
        try:
            connection.ask(Done(self._version, self._part, self._shared.name, holds))
            connection.noted()
        except (OSError, WireError) as error:
            # It forgets by itself, after a while.
            log.debug("%s was not told that a download is over: %s", connection.address, error)
            connection.close()
        else:
            self._shared.give_back(connection)

    def _ask(self, parent: str) -> list[str] | None:
        """Whom the origin names; None when it says nothing."""
        shared, failed = self._shared, tuple([*self._failed][-MAX_FAILED:])
        if time.monotonic() < self._silent_until:
            return None
        if (connection := self._open(self.origin)) is None:
            self._silent_until = time.monotonic() + shared.stall_s
            return None
        try:
            connection.ask(Ask(self._version, self._part, shared.name, shared.address, parent, failed))
            parents = connection.parents()
        except (OSError, WireError) as error:
            self.failed(connection.address, str(error))
            self._silent_until = time.monotonic() + shared.stall_s
            connection.close()
            return None
        shared.give_back(connection)
        self._failed.clear()
        self._told, self._asked = True, time.monotonic()
        return [address for address in parents if address != shared.address]

    def _others(self) -> list[str]:
        """Without the origin: anybody may have it."""
        out = {self._shared.address, self.origin, *self._failed}
        others = [address for address in self._shared.addresses().values() if address not in out]
        return random.sample(others, min(MAX_PARENTS, len(others)))

    def _open(self, address: str) -> Connection | None:
        shared = self._shared
        if not address or not shared.standing.trusted(address, time.monotonic()):
            return None
        if connection := shared.take(address):
            return self._cancellation.use(connection)
        connection = Connection(address, connect_s=shared.connect_s, stall_s=shared.stall_s)
        try:
            self._cancellation.use(connection).open(shared.secret, shared.run_id)
        except (OSError, WireError, WeightError) as error:
            self.failed(address, str(error))
            connection.close()
            return None
        return connection
