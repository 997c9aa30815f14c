"""The connection to Redis: bounded waits, retries with jittered backoff, and errors as sentences without secrets."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import re
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import redis.asyncio as aioredis
from redis import exceptions
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from broker.redis.scripts import scripts
from headrace.config import BrokerConfig
from headrace.errors import BrokerUnavailable, ConfigError

T = TypeVar("T")
log = logging.getLogger(__name__)

MAX_CONNECTIONS = 32
"""Of one service to Redis; each blocking read holds one."""
FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.02, 1.0
READ_MARGIN_S = 5.0
"""A reply may come this much later than the longest block."""

_URL_PARTS = {"connection_class", "username", "password", "host", "port", "path", "db"}
_TLS_PARAMETERS = {"ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "ssl_check_hostname"}

_REFUSALS: tuple[tuple[type[exceptions.RedisError] | tuple[type[exceptions.RedisError], ...], str], ...] = (
    ((exceptions.AuthenticationError, exceptions.AuthorizationError), "refuses the user or the password of the URL"),
    (exceptions.NoPermissionError, "does not allow the user of the URL what headrace needs"),
    (exceptions.ReadOnlyError, "is a read-only replica; name its primary in the URL"),
)

_MISCONF = re.compile(r"MISCONF (?:Errors writing to the AOF file: )?([^.]*)")
"""Redis refuses writes while its disk does; in a script's error it stands after the script's name."""


class Connection:
    """One service's connections to one Redis. Opens them when they are needed."""

    def __init__(self, url: str, config: BrokerConfig) -> None:
        """Raises ConfigError for a URL that is none, or has parameters that headrace does not take."""
        parts = _parts_of(url)
        self.place = str(parts.get("path") or f"{parts.get('host', 'localhost')}:{parts.get('port', 6379)}")
        """Host and port, for people."""
        self.block_ms = config.stream_block_ms
        """Longest block of one read."""
        self._patience_s = config.connect_timeout_s
        self._hasty_s = config.connect_timeout_s
        pool = aioredis.BlockingConnectionPool.from_url(
            url,
            max_connections=MAX_CONNECTIONS,
            timeout=config.connect_timeout_s,
            socket_timeout=config.stream_block_ms / 1000 + READ_MARGIN_S,
            socket_connect_timeout=config.connect_timeout_s,
            # A path is a socket of this machine, which needs no probes and takes no option for them.
            **({} if "path" in parts else {"socket_keepalive": True}),
            # Large enough that a group comes in few reads.
            socket_read_size=1 << 18,
            # Retries are decided in `call`, where they are bounded and said.
            retry=Retry(NoBackoff(), 0),
            protocol=2,
        )
        # Any: the client's own annotations leave its generic command out.
        self._client: Any = aioredis.Redis.from_pool(pool)
        self._ready = False
        self._readying = asyncio.Lock()

    async def call(
        self,
        send: Callable[[], Awaitable[T]],
        *,
        on_failure: Callable[[exceptions.RedisError], Awaitable[bool]] | None = None,
    ) -> T:
        """Await `send` until it has an answer. It must be harmless to repeat.

        Connections that fail, and a Redis that is full or loading, are tried again for `connect_timeout_s` with
        backoff and jitter; then BrokerUnavailable. `on_failure` may mend what Redis answered, and returns True to
        try again; what it leaves is raised.
        """
        give_up: float | None = None
        backoff_s = FIRST_BACKOFF_S
        while True:
            try:
                if not self._ready:
                    await self._make_ready()
                return await send()
            except exceptions.NoScriptError:
                self._ready = False
                failure: Exception = BrokerUnavailable(f"Redis at {self.place} forgets its scripts")
            except exceptions.RedisError as error:
                failure = error if on_failure and await on_failure(error) else self._judge(error)
            now = time.monotonic()
            if give_up is None:
                give_up = now + self._patience_s
                log.warning("%s; trying again for %g s", self._sentence(failure), self._patience_s)
            elif now >= give_up:
                raise BrokerUnavailable(f"{self._sentence(failure)}; gave up after {self._patience_s:g} s")
            await asyncio.sleep(min(backoff_s, give_up - now + 0.01) * random.uniform(0.5, 1.0))
            backoff_s = min(2 * backoff_s, LAST_BACKOFF_S)

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

    def hasten(self) -> None:
        """From now on an outage is waited for no longer than `connect_timeout_s`."""
        self._patience_s = self._hasty_s

    async def close(self) -> None:
        await self._client.aclose(close_connection_pool=True)

    async def _make_ready(self) -> None:
        """Check the server and load the scripts, once per connection and once more after it forgot them."""
        async with self._readying:
            if self._ready:
                return
            await self._check_policy()
            await self.execute_all([("SCRIPT LOAD", script.text) for script in scripts().values()])
            self._ready = True

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

    def _judge(self, error: exceptions.RedisError) -> exceptions.RedisError:
        """The error itself when it is worth another try. Raises BrokerUnavailable when it is not."""
        for kinds, sentence in _REFUSALS:
            if isinstance(error, kinds):
                raise BrokerUnavailable(f"Redis at {self.place} {sentence}") from None
        text = str(error)
        if text.startswith(("NOAUTH", "WRONGPASS")):
            raise BrokerUnavailable(f"Redis at {self.place} {_REFUSALS[0][1]}") from None
        again = (
            exceptions.ConnectionError,
            exceptions.TimeoutError,
            exceptions.BusyLoadingError,
            exceptions.OutOfMemoryError,
            exceptions.TryAgainError,
        )
        if isinstance(error, again) or text.startswith(("OOM", "MASTERDOWN", "CLUSTERDOWN")) or "-OOM" in text:
            return error
        if _MISCONF.search(text):
            return error
        raise BrokerUnavailable(f"Redis at {self.place} answered: {text}") from error

    def _sentence(self, failure: Exception) -> str:
        if isinstance(failure, BrokerUnavailable):
            return str(failure)
        text = str(failure)
        if found := _MISCONF.search(text):
            return f"Redis at {self.place} cannot write to its disk ({found[1]})"
        if "OOM" in text or isinstance(failure, exceptions.OutOfMemoryError):
            return f"Redis at {self.place} is full (maxmemory)"
        if isinstance(failure, exceptions.BusyLoadingError):
            return f"Redis at {self.place} is loading its data"
        if isinstance(failure, exceptions.TimeoutError):
            return f"Redis at {self.place} does not answer in time"
        if isinstance(failure, exceptions.ConnectionError):
            return f"Redis at {self.place} cannot be reached ({_cause(failure)})"
        return f"Redis at {self.place} answered: {text}"


def _parts_of(url: str) -> dict[str, Any]:
    """What the client reads from a URL, where a parameter wins over what the code sets (timeouts, protocol)."""
    try:
        parts = dict(parse_url(url))
    except ValueError:
        # Without its cause, which quotes the URL: a password with an unescaped "/" or "#" is read as a port.
        raise ConfigError(
            "the Redis URL must look like redis://[user:password@]host[:port][/db], rediss://… or unix://path, "
            "with special characters of a password percent-encoded"
        ) from None
    known = _URL_PARTS | (_TLS_PARAMETERS if url.startswith("rediss:") else set())
    if unknown := sorted(parts.keys() - known):
        raise ConfigError(
            f"the Redis URL has the parameter {unknown[0]!r}, which headrace does not take; leave it out "
            f"(with rediss:// it takes {', '.join(sorted(_TLS_PARAMETERS))})"
        )
    return parts


def _cause(error: Exception) -> str:
    """What the operating system says, without the client's own wrapping."""
    root: BaseException | None = error
    while root is not None and not isinstance(root, OSError):
        root = root.__cause__ or root.__context__
    if isinstance(root, OSError) and root.errno and not isinstance(root, socket.gaierror):
        return os.strerror(root.errno)
    return (isinstance(root, OSError) and root.strerror) or "connection lost"
