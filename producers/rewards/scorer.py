"""Scoring beside decoding: rewards run in worker processes that are killed at their deadline."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import pickle
from collections.abc import Mapping
from concurrent.futures.process import BrokenProcessPool

from pebble import ProcessExpired, ProcessPool

from broker.messages import TaskKind
from headrace.config import EnvironmentConfig
from headrace.objects import reason
from producers.environments.api import Rollout
from producers.rewards import worker
from producers.rewards.worker import Score

log = logging.getLogger(__name__)

START_S = 60.0
"""What a worker may take to start: it imports the user's code."""


class Scorer:
    """`workers` processes, each with every environment and reward of the run.

    A call is a Score with a reason instead of a reward when the reward raises, is silent past `deadline_s`, or
    takes its process down; a process that was killed is replaced.
    """

    def __init__(self, environments: Mapping[str, EnvironmentConfig], *, workers: int, deadline_s: float) -> None:
        self._environments = dict(environments)
        self._workers = workers
        self._deadline_s = deadline_s
        self._pool = self._new_pool()
        self._open = 0
        self._closed = False

    def start(self) -> None:
        """Start the processes now, so that they are ready when the first rollout ends."""
        if not self._pool.active:
            log.warning("the reward's worker processes did not start; the next call tries again")

    @property
    def open_calls(self) -> int:
        return self._open

    async def score(self, name: str, kind: TaskKind, rollout: Rollout) -> Score:
        """The reward of a finished rollout of environment `name`; of an evaluation 1 for right and 0 for wrong."""
        try:
            pickled = pickle.dumps(rollout)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            return Score(failure=f"the rollout cannot be sent to its reward ({reason(error)})")
        self._open += 1
        try:
            return await self._call(name, kind, pickled)
        finally:
            self._open -= 1

    async def close(self) -> None:
        """End all processes. Calls that are open end as failures. Idempotent."""
        if not self._closed:
            self._closed = True
            await asyncio.to_thread(_stop, self._pool)

    async def _call(self, name: str, kind: TaskKind, pickled: bytes) -> Score:
        patience_s = START_S + self._deadline_s * (1 + self._open // self._workers)
        try:
            future = asyncio.wrap_future(
                (await self._usable_pool()).schedule(worker.score, args=[name, kind, pickled], timeout=self._deadline_s)
            )
        except RuntimeError:
            # Its processes died between two calls; the next call makes a new pool.
            return Score(failure="the reward's worker processes ended")
        try:
            done, _ = await asyncio.wait({future}, timeout=patience_s)
        finally:
            future.cancel()
        if not done:
            return Score(failure=f"reward was not reached within {patience_s:.0f} s")
        if future.cancelled():
            return Score(failure="reward was cancelled")
        error = future.exception()
        return future.result() if error is None else Score(failure=self._sentence(error))

    def _sentence(self, error: BaseException) -> str:
        match error:
            case TimeoutError():
                return f"reward took longer than {self._deadline_s:g} s"
            case ProcessExpired():
                return f"reward ended its worker process (exit code {error.exitcode})"
            case BrokenProcessPool():
                return "the reward's worker processes ended"
            case _:
                return f"reward raised {reason(error)}"

    async def _usable_pool(self) -> ProcessPool:
        if not self._pool.active and not self._closed:
            log.warning("the reward's worker processes ended; starting new ones")
            broken, self._pool = self._pool, self._new_pool()
            await asyncio.to_thread(_stop, broken)
        return self._pool

    def _new_pool(self) -> ProcessPool:
        # "spawn": a fork would copy the engine's threads, its locks and its memory.
        return ProcessPool(
            self._workers,
            initializer=worker.load,
            initargs=[self._environments],
            context=multiprocessing.get_context("spawn"),
        )


def _stop(pool: ProcessPool) -> None:
    pool.stop()  # type: ignore[no-untyped-call]
    pool.join()
