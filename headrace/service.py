"""One supervisor shape for every service: named loops in a task group, signals in the entry point only.

A loop that returns is done; a loop that raises ends the service with its reason. SIGTERM and SIGINT set
`stopping`: loops stop taking work and drain; after `drain_s`, or at a second signal, they are cancelled.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from headrace.errors import HeadraceError

log = logging.getLogger(__name__)

COLLECT_EVERY = 10_000
"""New objects that can be part of a cycle, until the youngest are looked at."""
Loop = Callable[[], Coroutine[Any, Any, None]]


class Service:
    """The named loops of one process."""

    def __init__(self, name: str, *, drain_s: float = 30.0) -> None:
        self.name = name
        self.drain_s = drain_s
        self.stopping = asyncio.Event()
        """Set once; every loop ends by itself soon after."""
        self.event_loop_lag_s = 0.0
        """How late the event loop woke up last; a metric of every service."""
        self._loops: dict[str, Loop] = {}

    def add(self, name: str, loop: Loop) -> None:
        """Register a loop before `run`."""
        self._loops[name] = loop

    def stop(self, reason: str) -> None:
        """Ask all loops to drain. Only the first reason is told."""
        if not self.stopping.is_set():
            log.info("%s stops: %s", self.name, reason)
            self.stopping.set()

    async def run(self) -> None:
        """Run all loops until they have ended. Raises the first loop's error."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self.ending_all(loop), name=name) for name, loop in self._loops.items()]
                helpers = [
                    group.create_task(self._watch_drain(tasks), name="drain"),
                    group.create_task(self._watch_lag(), name="event-loop-lag"),
                ]
                await asyncio.wait(tasks, return_when=asyncio.ALL_COMPLETED)
                for helper in helpers:
                    helper.cancel()
        except* HeadraceError as group_error:
            raise _first(group_error) from None

    async def sleep(self, seconds: float) -> bool:
        """Wait, but not longer than until the service stops. True when it stops."""
        try:
            # Not asyncio.wait_for, which loses a cancellation that comes together with the event (Python 3.11).
            async with asyncio.timeout(seconds):
                await self.stopping.wait()
        except TimeoutError:
            return False
        return True

    async def ending_all(self, loop: Loop) -> None:
        """Run one loop; one that fails, be it by a bug, stops the others by the flag too, not only by cancelling them.

        A cancellation that meets the end of a send is lost (asyncio.wait_for of Python 3.11, inside the Redis client).
        """
        try:
            await loop()
        except Exception as error:
            # A loop with a task group of its own raises a group.
            first = _first(error)
            self.stop(str(first) if isinstance(first, HeadraceError) else repr(first))
            raise

    async def _watch_drain(self, tasks: list[asyncio.Task[None]]) -> None:
        await self.stopping.wait()
        _, late = await asyncio.wait(tasks, timeout=self.drain_s)
        for task in late:
            log.warning("%s: %s did not drain within %.0f s", self.name, task.get_name(), self.drain_s)
            task.cancel()

    async def _watch_lag(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(1.0)
            self.event_loop_lag_s = time.monotonic() - before - 1.0


def _first(error: BaseException) -> BaseException:
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


def main(name: str, start: Callable[[Service], Awaitable[None]], *, drain_s: float = 30.0) -> int:
    """Run one service to its end under uvloop. `start` builds its parts and adds its loops.

    Returns the exit code: 0 after a clean end, else that of the error, whose sentence goes to stderr.
    """
    import uvloop

    async def serve() -> None:
        service = Service(name, drain_s=drain_s)
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(_unless_nobody_asks)
        _install_signals(service)
        try:
            await start(service)
            collect_seldom()
            await service.run()
        finally:
            _ignore_signals(loop)

    serving = serve()
    try:
        uvloop.run(serving)
    except HeadraceError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return error.exit_code
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 130
    finally:
        # An interrupt can come before it has begun, and a coroutine that never did complains on stderr.
        serving.close()
    return 0


def collect_seldom() -> None:
    """Have the cycle collector look seldom, and never again at what start-up made.

    A group brings some dozens of objects that live until it is trained, none of them in a cycle. To look at them again
    and again, at Python's own threshold of 700 new objects, took a seventh of the message path's time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_EVERY, 10, 10)


def _unless_nobody_asks(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """All but a name that is not found for a connection that was given up meanwhile: uvloop leaves that one unread."""
    if not isinstance(context.get("exception"), socket.gaierror):
        loop.default_exception_handler(context)


def _install_signals(service: Service) -> None:
    loop = asyncio.get_running_loop()
    current = asyncio.current_task()
    signalled = False

    def on_signal(number: int) -> None:
        nonlocal signalled
        # Signals are counted, not stops: one that leaves by itself, at the end of a run, may be told so besides.
        if signalled and current is not None:
            current.cancel()
        signalled = True
        service.stop(signal.Signals(number).name)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)


def _ignore_signals(loop: asyncio.AbstractEventLoop) -> None:
    """A process that has ended its loops is leaving: being told so once more must not make that look like a death.

    With a handler in place it would: Python restores the default action while it shuts down. The loop may be closed
    already: a SystemExit inside it ends it before its tasks.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        if not loop.is_closed():
            loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_IGN)
