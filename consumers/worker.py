"""The worker: the one thread that computes, so that the event loop goes on answering."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

T = TypeVar("T")


class Worker:
    """Does one thing at a time, in the order in which it was asked."""

    def __init__(self, name: str, around: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        """`around`: what each work is done in."""
        self._around = around
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def __call__(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._do, work)

    def _do(self, work: Callable[[], T]) -> T:
        with self._around():
            return work()

    async def close(self) -> None:
        """Wait for what it does now."""
        await asyncio.to_thread(self._pool.shutdown)
