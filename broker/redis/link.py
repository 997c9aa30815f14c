"""What all ports of one run share: its keys, its scripts, and how answers of Redis become our errors."""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar

from redis import exceptions

from broker.api import Fence, Reign, RunRecord
from broker.bounds import MAX_REIGNS
from broker.keys import Keys
from broker.redis.connection import Connection
from broker.redis.failures import worth_waiting
from broker.redis.records import decode_record
from broker.redis.scripts import scripts
from headrace.errors import Fenced, Refused
from headrace.version import PolicyVersion

T = TypeVar("T")
log = logging.getLogger(__name__)

Fields = dict[bytes, bytes]
Entry = tuple[str, Fields]
"""A stream entry: id and fields."""

_FENCED = re.compile(r"FENCED (\d+)")


class Mends(Protocol):
    async def whole(self) -> None:
        """Put right what Redis lost since the last time; it is the trainer's port that can."""
        ...


class Link:
    """The connection of one service to one run."""

    def __init__(self, connection: Connection, run_id: str) -> None:
        self.connection = connection
        self.keys = Keys(run_id)
        self._record: RunRecord | None = None
        self.reigns: dict[int, Reign] = {}
        """What is known of the hash `reigns`, and of what this service published itself."""
        self.pins: set[PolicyVersion] = set()
        """What this service has pinned and not let go."""
        self.mends: Mends | None = None
        """Of the trainer's port."""

    @property
    def run_id(self) -> str:
        return self.keys.run_id

    async def record(self) -> RunRecord:
        """The run's record, which does not change while services use it. Raises Refused where there is none."""
        if self._record is None:
            raw = await self.send("GET", self.keys.of("record"))
            if raw is None:
                raise self.gone()
            self._record = decode_record(raw)
        return self._record

    def published(self, incarnation: int, reign: Reign) -> None:
        """Remember that these versions were published; the oldest incarnations are forgotten."""
        known = self.reigns.get(incarnation, reign)
        self.reigns[incarnation] = Reign(min(known.first, reign.first), max(known.newest, reign.newest))
        if len(self.reigns) > MAX_REIGNS:
            del self.reigns[min(self.reigns)]

    async def script(self, name: str, *args: Any, fence: Fence | None = None) -> Any:
        """Run a script by name. Raises Fenced, Refused when the run is gone, BrokerUnavailable."""
        command = self.evalsha(name, *args, fence=fence)
        return await self.call(lambda: self.connection.execute(*command))

    async def once(self, command: tuple[Any, ...]) -> Any:
        """One command, tried once: for steps of a `call` that must know when a reply was lost."""
        return await self.connection.execute(*command)

    async def once_all(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Several commands in one round trip, tried once."""
        return await self.connection.execute_all(commands)

    async def send(self, *command: Any) -> Any:
        """One command."""
        return await self.call(lambda: self.connection.execute(*command))

    async def ask(self, *command: Any) -> list[Any]:
        """One command whose first answer is never missing as long as the run is there."""

        async def send() -> list[Any]:
            answers: list[Any] = await self.connection.execute(*command)
            if answers[0] is None:
                raise exceptions.ResponseError("GONE")
            return answers

        return await self.call(send)

    async def pipeline(self, *commands: tuple[Any, ...]) -> list[Any]:
        """Several commands in one round trip, not as a transaction."""
        return await self.call(lambda: self.connection.execute_all(commands))

    def evalsha(self, name: str, *args: Any, fence: Fence | None = None) -> tuple[Any, ...]:
        script = scripts()[name]
        assert script.fenced == (fence is not None), f"{name} and its fence do not fit"
        right = () if fence is None else (str(fence.incarnation), fence.nonce)
        return ("EVALSHA", script.sha, len(script.keys), *map(self.keys.of, script.keys), *right, *args)

    async def call(self, send: Callable[[], Awaitable[T]]) -> T:
        epoch = self.connection.epoch

        async def attempt() -> T:
            nonlocal epoch
            await self.whole()
            epoch = self.connection.epoch
            return await send()

        return await self.connection.call(attempt, on_failure=lambda error: self.on_failure(error, epoch))

    async def whole(self) -> None:
        """Return once Redis has what this service knows of the run, where it is one that knows."""
        if self.mends is not None:
            await self.mends.whole()

    def block_ms(self, wanted: int) -> int:
        """A block that Redis accepts: 0 would wait for ever, and more than the configured one is cut by the socket."""
        return max(1, min(wanted, self.connection.block_ms))

    async def on_failure(self, error: exceptions.RedisError, epoch: int | None = None) -> str | None:
        """What a `call` of this run does about an answer of Redis, as `Connection.call` asks it.

        `epoch` is the connection's when it was sent: a loss that another call has found since is not found twice.
        """
        if not isinstance(error, exceptions.ResponseError):
            return None
        text = str(error)
        if "GONE" in text:
            return await self._vanished(epoch)
        if "DELETED" in text:
            raise self._was_deleted() from None
        if fenced := _FENCED.search(text):
            raise Fenced(
                f"run {self.run_id} now belongs to the trainer of incarnation {fenced.group(1)}; "
                "this one may change nothing"
            ) from None
        # A read that waited when its stream went is answered UNBLOCKED by Redis 7, NOGROUP by others.
        if any(word in text for word in ("NOGROUP", "UNBLOCKED", "no such key")):
            return await self._repair(epoch)
        return None

    async def _vanished(self, epoch: int | None) -> str:
        """The run is not there. Raises Refused when it never was, or was deleted; else its trainer puts it back."""
        if self._record is None:
            raise self.gone() from None
        try:
            deleted = await self.connection.execute("EXISTS", self.keys.of("deleted"))
        except exceptions.RedisError as error:
            return worth_waiting(error, self.place)
        if deleted:
            raise self._was_deleted() from None
        self._lost(epoch)
        if self.mends is None:
            return f"run {self.run_id} has vanished from Redis at {self.place}, and its trainer has yet to put it back"
        await self.mends.whole()
        return ""

    async def _repair(self, epoch: int | None) -> str:
        """Make the consumer groups anew: their streams may have been emptied."""
        log.warning("run %s: a consumer group is missing at Redis at %s; making it anew", self.run_id, self.place)
        try:
            await self.connection.execute(*self.evalsha("repair"))
        except exceptions.ResponseError as error:
            if "GONE" in str(error):
                return await self._vanished(epoch)
            return worth_waiting(error, self.place)
        except exceptions.RedisError as error:
            return worth_waiting(error, self.place)
        self._lost(epoch)
        return ""

    def _lost(self, epoch: int | None) -> None:
        if epoch in (None, self.connection.epoch):
            self.connection.epoch += 1

    @property
    def place(self) -> str:
        return self.connection.place

    def gone(self) -> Refused:
        """The error of a run that is not there (any more)."""
        return Refused(
            f"there is no run {self.run_id!r} in Redis at {self.place}; `headrace runs list` shows those that are"
        )

    def _was_deleted(self) -> Refused:
        return Refused(f"run {self.run_id!r} was deleted from Redis at {self.place}")


def entries_of(reply: Any) -> list[Entry]:
    """Entries in the reply of XRANGE or XREAD as the client parses them; deleted ones are left out."""
    return [(text(entry_id), fields) for entry_id, fields in reply or () if fields is not None]


def stream_entries(reply: Any) -> list[Entry]:
    """Entries in the reply of XREAD or XREADGROUP on one stream."""
    return entries_of(reply[0][1]) if reply else []


def fields_of(flat: list[bytes]) -> Fields:
    """Alternating names and values as a dict, from a script's reply."""
    return dict(zip(flat[::2], flat[1::2], strict=True))


def text(raw: bytes | str | None) -> str:
    """Redis's bytes as text; what is not UTF-8 is shown, not hidden."""
    if raw is None:
        return ""
    return raw if isinstance(raw, str) else raw.decode("utf-8", "backslashreplace")
