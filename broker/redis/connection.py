"""The connection to Redis: bounded waits, retries with jittered backoff, and whether it is still the same server."""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar
from weakref import WeakSet

import redis.asyncio as aioredis
from redis import exceptions
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from broker.redis.address import parts_of
from broker.redis.failures import worth_waiting
from broker.redis.packing import PACKING
from broker.redis.scripts import scripts
from broker.redis.waits import Waits
from headrace.config import BrokerConfig
from headrace.errors import BrokerUnavailable

T = TypeVar("T")
log = logging.getLogger(__name__)

MAX_CONNECTIONS = 32
"""Of one service to Redis; each blocking read holds one."""
FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.02, 1.0
READ_MARGIN_S = 5.0
"""A reply may come this much later than the longest block."""
_SERVER = re.compile(rb"^run_id:(\w+)", re.MULTILINE)

OnFailure = Callable[[exceptions.RedisError], Awaitable[str | None]]
"""Looks at what Redis answered: None leaves it, "" says that it is mended, a sentence that it may pass by waiting."""


class Connection:
    """One service's connections to one Redis. Opens them when they are needed."""

    def __init__(self, url: str, config: BrokerConfig) -> None:
        """Raises ConfigError for a URL that is none, or has parameters that headrace does not take."""
        parts = parts_of(url)
        self.place = str(parts.get("path") or f"{parts.get('host', 'localhost')}:{parts.get('port', 6379)}")
        """Host and port, for people."""
        self.block_ms = config.stream_block_ms
        """Longest block of one read."""
        self.epoch = 0
        """Counts up whenever Redis may have lost writes: it was started anew, or emptied."""
        self._connect_s, self._outage_s = config.connect_timeout_s, config.outage_s
        self._hasty = False
        self._reached = False
        pool = aioredis.BlockingConnectionPool.from_url(
            url,
            max_connections=MAX_CONNECTIONS,
            timeout=config.connect_timeout_s,
            socket_timeout=config.stream_block_ms / 1000 + READ_MARGIN_S,
            socket_connect_timeout=config.connect_timeout_s,
            redis_connect_func=self._greet,
            # A path is a socket of this machine, which needs no probes and takes no option for them.
            **({} if "path" in parts else {"socket_keepalive": True}),
            # Large enough that a group comes in few reads.
            socket_read_size=1 << 18,
            # Retries are decided in `call`, where they are bounded and said.
            retry=Retry(NoBackoff(), 0),
            protocol=2,
        )
        pool.connection_class = PACKING[pool.connection_class]
        # Any: the client's own annotations leave its generic command out.
        self._client: Any = aioredis.Redis.from_pool(pool)
        self._ready = False
        self._readying = asyncio.Lock()
        self._server = b""
        self._known: WeakSet[Any] = WeakSet()
        """Sockets that were open before, each at most `MAX_CONNECTIONS` times anew."""
        self.waits = Waits(self.place)

    def hasten(self) -> None:
        """From now on an outage is waited for no longer than `connect_timeout_s`."""
        self._hasty = True

    async def call(self, send: Callable[[], Awaitable[T]], *, on_failure: OnFailure | None = None) -> T:
        """Await `send` until it has an answer. It must be harmless to repeat.

        Connections that fail, and a Redis that is full or loading, are tried again with backoff and jitter: for
        `connect_timeout_s` where Redis was never reached or the service is leaving, else for `outage_s` and once
        more, since it may be this process that was stopped for so long; then BrokerUnavailable.
        """
        since: float | None = None
        backoff_s = FIRST_BACKOFF_S
        answered = False
        try:
            while True:
                began = time.monotonic()
                try:
                    if not self._ready:
                        await self._make_ready()
                    answer = await send()
                except exceptions.NoScriptError:
                    self._ready = False
                    sentence = f"Redis at {self.place} forgets its scripts"
                except exceptions.RedisError as error:
                    # A silent Redis has kept us waiting since the first try began; one that is gone may have been there
                    # until now, with nothing to say.
                    silent = isinstance(error, exceptions.TimeoutError)
                    since = since or (began if silent else time.monotonic())
                    sentence = await self._look_at(error, on_failure)
                else:
                    answered = True
                    return answer
                now = time.monotonic()
                since = now if since is None else since
                left_s = since + self._patience_s - now
                if (began if self._patient else now) - since >= self._patience_s:
                    raise BrokerUnavailable(
                        f"{sentence or self.place + ' keeps failing'}; gave up after {now - since:.1f} s"
                    )
                self.waits.note(send, sentence, now - since, self._patience_s)
                await asyncio.sleep(min(backoff_s, left_s + 0.01) * random.uniform(0.5, 1.0))
                backoff_s = min(2 * backoff_s, LAST_BACKOFF_S)
        finally:
            if since is not None:
                self.waits.over(send, answered=answered)

    async def execute(self, *command: Any) -> Any:
        """One command, tried once."""
        return await self._client.execute_command(*command)

    async def execute_all(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Several commands in one round trip, not as a transaction, tried once. Raises the first one's error."""
        async with self._client.pipeline(transaction=False) as pipeline:
            for command in commands:
                pipeline.execute_command(*command)
            answers: list[Any] = await pipeline.execute()
        return answers

    async def close(self) -> None:
        await self._client.aclose(close_connection_pool=True)

    @property
    def _patient(self) -> bool:
        return self._reached and not self._hasty

    @property
    def _patience_s(self) -> float:
        return self._outage_s if self._patient else self._connect_s

    async def _greet(self, socket: Any) -> None:
        """A connection is opened, perhaps to a server that was started anew since the last one."""
        await socket.on_connect()
        await socket.send_command("INFO", "server")
        try:
            found = _SERVER.search(await socket.read_response())
        except exceptions.NoPermissionError:
            found = None
        server = found[1] if found else b""
        # Where Redis does not say who it is, a connection that broke may mean anything.
        anew = server != self._server if server else socket in self._known
        if anew and (self._server or not server):
            log.warning("Redis at %s was started anew; what it lost is looked for", self.place)
            self.epoch += 1
            self._ready = False
        self._server = server
        self._known.add(socket)

    async def _make_ready(self) -> None:
        """Check the server and load the scripts, once per server and once more after it forgot them."""
        async with self._readying:
            if self._ready:
                return
            await self._check_policy()
            await self.execute_all([("SCRIPT LOAD", script.text) for script in scripts().values()])
            self._ready = self._reached = True

    async def _check_policy(self) -> None:
        try:
            memory = await self._client.info("memory")
        except exceptions.NoPermissionError:
            log.warning("Redis at %s does not let us see its maxmemory-policy; it must be noeviction", self.place)
            return
        policy = memory.get("maxmemory_policy", "noeviction")
        if policy != "noeviction":
            raise BrokerUnavailable(
                f"Redis at {self.place} has maxmemory-policy {policy}, which may delete a run's keys; "
                "set it to noeviction"
            )

    async def _look_at(self, error: exceptions.RedisError, on_failure: OnFailure | None) -> str:
        """The sentence of an outage; empty for what is mended already. Raises BrokerUnavailable for all else."""
        sentence = await on_failure(error) if on_failure else None
        return worth_waiting(error, self.place) if sentence is None else sentence
