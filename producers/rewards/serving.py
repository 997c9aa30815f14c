"""The loop of a reward's worker process: calls in, scores out, over one socket.

It waits for the next call; its parent, which also sets the deadlines, wakes it. It ends when the socket is closed.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import struct
import sys
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.config import EnvironmentConfig
from headrace.errors import EnvironmentLoadError
from headrace.objects import reason
from producers.rewards.worker import Call, Judge, Score

LENGTH = struct.Struct(">Q")
"""Before each message, in both directions. To a worker go pickles, back come `answered` scores: it is not trusted."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The first message to a worker."""

    path: tuple[str, ...]
    """Where its parent finds modules."""
    environment: EnvironmentConfig


def framed(message: bytes) -> bytes:
    return LENGTH.pack(len(message)) + message


def answered(message: bytes) -> list[Score]:
    """The scores of an answer. Raises ValueError (msgspec's errors are that)."""
    return msgspec.msgpack.decode(message, type=list[Score])


def serve(channel: int) -> None:
    """Answer calls. Loading comes first, and an empty message says that it is done: no call's deadline pays for it."""
    with socket.socket(fileno=channel) as calls:
        setup: Setup = pickle.loads(_read(calls))  # noqa: S301 - our own parent process wrote it
        sys.path[:] = setup.path
        worker = os.getpid()
        # One event loop for all calls, because a reward may keep connections open between them.
        with asyncio.Runner() as runner:
            judge = _load(setup.environment)
            calls.sendall(framed(b""))
            while message := _read(calls):
                scores = _answer(runner, judge, pickle.loads(message))  # noqa: S301
                if os.getpid() != worker:
                    # The reward forked, and this is its child, which came back from there as if it were the worker.
                    os._exit(0)
                calls.sendall(framed(msgspec.msgpack.encode(scores)))


def _load(config: EnvironmentConfig) -> Judge | EnvironmentLoadError:
    try:
        return Judge.load(config)
    except EnvironmentLoadError as error:
        return error


def _answer(runner: asyncio.Runner, judge: Judge | EnvironmentLoadError, call: Call) -> list[Score]:
    if isinstance(judge, EnvironmentLoadError):
        return [Score(failure=str(judge))] * call.count
    try:
        scores = runner.run(_scores(judge(call)))
    except (SystemExit, KeyboardInterrupt) as error:
        scores = f"reward raised {reason(error)}"
    return [Score(failure=scores)] * call.count if isinstance(scores, str) else scores


async def _scores(judging: Coroutine[Any, Any, list[Score]]) -> list[Score] | str:
    # A task holds its exception as a value, whatever its type.
    task = asyncio.ensure_future(judging)
    await asyncio.wait({task})
    if task.cancelled():
        return "reward was cancelled by its own code"
    error = task.exception()
    return task.result() if error is None else f"reward raised {reason(error)}"


def _read(calls: socket.socket) -> bytes:
    """The next message; empty when the socket is closed."""
    head = _read_exactly(calls, LENGTH.size)
    return _read_exactly(calls, LENGTH.unpack(head)[0]) if head else b""


def _read_exactly(calls: socket.socket, size: int) -> bytes:
    parts, missing = list[bytes](), size
    while missing:
        part = calls.recv(min(missing, 1 << 20))
        if not part:
            return b""
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)
