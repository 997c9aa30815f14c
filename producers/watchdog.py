"""Ends a producer that cannot end itself: its event loop stands still, or something holds up its leaving.

Wait graph: a thread of its own waits a quarter of a lease at a time, and nobody waits for it. It counts its own
wake-ups and not the time, so that a process that was stopped and goes on is not taken for one that stands still.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import traceback
from collections.abc import Callable

from headrace.errors import ServiceError

LEASES = 6
"""Lease times without a turn of the event loop. Its tasks are others' after the first."""
LOOKS = 4
"""At each lease time."""


class Watchdog:
    """Watches the event loop that it was made on, once started."""

    def __init__(self, name: str, lease_s: float, end: Callable[[str], None] | None = None) -> None:
        """`end` is called, from the watchdog's thread, with a sentence; without one the process ends by it."""
        self._name = name
        self._lease_s = lease_s
        self._end = end or self._exit
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._turned = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="headrace-watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closed.set()

    def leave(self, within_s: float, what: str) -> None:
        """The process ends after so long, be it by force."""
        timer = threading.Timer(within_s, self._end, [f"{what} did not end within {within_s:g} s; it ends by force"])
        timer.daemon = True
        timer.start()

    def _watch(self) -> None:
        misses = 0
        while True:
            self._turned.clear()
            try:
                self._loop.call_soon_threadsafe(self._turned.set)
            except RuntimeError:
                return  # the loop was closed
            if self._closed.wait(self._lease_s / LOOKS):
                return
            misses = 0 if self._turned.is_set() else misses + 1
            if misses >= LEASES * LOOKS:
                self._end(self._sentence())
                return

    def _sentence(self) -> str:
        """Who stands in the way, as far as it can be seen from here."""
        task = asyncio.current_task(self._loop)
        whom = task.get_name() if task is not None else "its event loop"
        frame = sys._current_frames().get(self._thread_id)
        where = traceback.extract_stack(frame)[-1] if frame is not None else None
        place = f" ({where.filename}, line {where.lineno}, in {where.name})" if where is not None else ""
        return (
            f"{whom}{place} has blocked everything for {LEASES * self._lease_s:g} s; code that waits or computes for "
            f"long must be awaitable (asyncio.to_thread makes it so)"
        )

    def _exit(self, sentence: str) -> None:
        print(f"{self._name}: {sentence}", file=sys.stderr, flush=True)
        # Nothing of Python's own ending is left to rely on: it would wait for the event loop.
        os._exit(ServiceError.exit_code)
