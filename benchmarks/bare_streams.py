"""The bare limit of the message path: the same bytes through XADD, XREADGROUP and XACK of redis-py, and nothing else.

Two processes, as the real path has; no validation, no leases, no deduplication, no answer to anybody. Which way of
using the client is the fastest depends on the machine, so there are several, and the benchmark takes the best one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from typing import Any

import redis
import redis.asyncio
import uvloop
from redis._parsers import Encoder, _AsyncHiredisParser, _AsyncRESP2Parser, _HiredisParser, _RESP2Parser
from redis.connection import PythonRespSerializer
from redis.utils import HIREDIS_AVAILABLE

from headrace.policy.memory import keep_freed_memory
from headrace.service import collect_seldom

Commands = list[tuple[Any, ...]]

READ_SIZE = 1 << 18
"""Bytes of one read from the socket, as in the real path."""
STREAM, GROUP = "bare", "readers"
BLOCK_MS = 5000
CUTOFF = 6000
"""What redis-py itself sends without copying."""


@dataclass(frozen=True, slots=True)
class Way:
    """How the bare client is used."""

    asynchronous: bool
    hiredis: bool

    def __str__(self) -> str:
        return f"{'asyncio' if self.asynchronous else 'sync'}, {'hiredis' if self.hiredis else 'pure Python'}"


def ways() -> list[Way]:
    """All that this machine has."""
    parsers = (False, True) if HIREDIS_AVAILABLE else (False,)
    return [Way(*flags) for flags in itertools.product((False, True), parsers)]


def writes(bodies: list[bytes], count: int, depth: int) -> Iterator[Commands]:
    """The producer's pipelines."""
    ring = itertools.cycle(bodies)
    for first in range(0, count, depth):
        yield [("XADD", STREAM, "*", "body", next(ring)) for _ in range(min(depth, count - first))]


class Reader:
    """The consumer's pipelines: each acknowledges what the one before brought."""

    def __init__(self, count: int, depth: int) -> None:
        self._left, self._depth = count, depth
        self._ids: list[bytes] = []

    def next(self) -> Commands:
        """Empty when all is read and acknowledged."""
        commands: Commands = []
        if self._ids:
            commands.append(("XACK", STREAM, GROUP, *self._ids))
        if self._left:
            place = ("COUNT", self._depth, "BLOCK", BLOCK_MS, "STREAMS", STREAM, ">")
            commands.append(("XREADGROUP", "GROUP", GROUP, "reader", *place))
        return commands

    def answered(self, answers: list[Any]) -> None:
        self._ids = [entry_id for entry_id, _ in answers[-1][0][1]] if self._left else []
        self._left -= len(self._ids)


def serve(pipe: Pipe, url: str, bodies: list[bytes], depth: int, writer: bool) -> None:
    """One process: for each (way, count) from the pipe it makes ready and says so; told again, it plays the round."""
    keep_freed_memory()
    collect_seldom()
    loop = uvloop.new_event_loop()
    clients: dict[Way, Any] = {}
    pipe.send(None)
    while job := pipe.recv():
        way, count = job
        if way not in clients:
            clients[way] = _client(url, way)
        reader = None if writer else Reader(count, depth)
        if reader:
            with redis.Redis.from_url(url) as client:
                client.delete(STREAM)
                client.xgroup_create(STREAM, GROUP, id="0", mkstream=True)
        pipelines = writes(bodies, count, depth) if reader is None else iter(reader.next, [])
        answered = reader.answered if reader else len
        pipe.send(None)
        pipe.recv()
        if way.asynchronous:
            loop.run_until_complete(_all_async(clients[way], pipelines, answered))
        else:
            _all_sync(clients[way], pipelines, answered)
        pipe.send(None)


def _all_sync(client: Any, pipelines: Iterator[Commands], answered: Callable[[list[Any]], object]) -> None:
    for commands in pipelines:
        with client.pipeline(transaction=False) as pipeline:
            for command in commands:
                pipeline.execute_command(*command)
            answered(pipeline.execute())


async def _all_async(client: Any, pipelines: Iterator[Commands], answered: Callable[[list[Any]], object]) -> None:
    for commands in pipelines:
        async with client.pipeline(transaction=False) as pipeline:
            for command in commands:
                pipeline.execute_command(*command)
            answered(await pipeline.execute())


def _client(url: str, way: Way) -> Any:
    if way.asynchronous:
        parser: Any = _AsyncHiredisParser if way.hiredis else _AsyncRESP2Parser
        return redis.asyncio.Redis.from_url(url, protocol=2, socket_read_size=READ_SIZE, parser_class=parser)
    parser = _HiredisParser if way.hiredis else _RESP2Parser
    # The packer of hiredis copies what it packs, which is slower here.
    packer = PythonRespSerializer(CUTOFF, Encoder("utf-8", "strict", False).encode)  # type: ignore[no-untyped-call]
    return redis.Redis.from_url(url, protocol=2, socket_read_size=READ_SIZE, parser_class=parser, command_packer=packer)
