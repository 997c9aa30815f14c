"""The worker processes of one environment's rewards, seen from the producer: started, asked, and ended with all they
started.

Wait graph: a call waits for a worker that is free (the call before it, which takes START_S and its deadline at most),
then for its answer. Pools know nothing of each other, so a call never waits for another environment's.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import pickle
import secrets
import signal
import socket
import sys
from collections.abc import Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from headrace.config import EnvironmentConfig
from headrace.objects import reason
from headrace.telemetry.phases import Lane
from producers.rewards.processes import end_marked
from producers.rewards.serving import LENGTH, Setup, answered, framed
from producers.rewards.worker import Call, Score

T = TypeVar("T")

log = logging.getLogger(__name__)

START_S = 60.0
"""What a worker may take to start: it imports the user's code."""
END_S = 10.0
"""What ending a worker may take: its keeper kills it with all that it started."""
MARK = "HEADRACE_REWARD_WORKER"
"""In the environment of a keeper, and of all that its worker starts: who they are if something kills the keeper."""
LARGEST_ANSWER = 64 << 20
"""Bytes of one answer of a worker."""


class WorkerLost(Exception):
    """A worker that gives no answer any more. Its text is the reason, to be read after "reward"."""


class Worker:
    """One worker process, with the keeper between it and this process (`producers/rewards/keeper.py`)."""

    def __init__(
        self,
        keeper: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        memory_mb: int,
        mark: str,
    ) -> None:
        self._keeper, self._reader, self._writer, self._memory_mb = keeper, reader, writer, memory_mb
        self._mark = mark
        self._ending: asyncio.Task[str] | None = None

    @classmethod
    async def start(cls, memory_mb: int) -> Worker:
        """Raises OSError."""
        ours, theirs = socket.socketpair()
        mark = secrets.token_hex(8)
        with ours, theirs:
            ours.setblocking(False)
            keeper = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "producers.rewards.keeper"),
                *(str(os.getpid()), str(theirs.fileno()), str(memory_mb << 20)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                env={**os.environ, MARK: mark},
                start_new_session=True,
            )
            reader, writer = await asyncio.open_unix_connection(sock=ours.dup())
        return cls(keeper, reader, writer, memory_mb, mark)

    @property
    def lost(self) -> bool:
        return self._ending is not None or self._keeper.returncode is not None or self._reader.at_eof()

    async def load(self, environment: EnvironmentConfig) -> None:
        """Let it load the environment and its rewards. Raises WorkerLost."""
        try:
            await self._ask(pickle.dumps(Setup(tuple(sys.path), environment)), START_S)
        except TimeoutError:
            raise WorkerLost(f"was not loaded within {START_S:g} s") from None

    async def ask(self, call: Call, deadline_s: float) -> list[Score]:
        """Raises WorkerLost when there is no answer in time, or one that cannot be read; it must be ended then."""
        try:
            scores = answered(await self._ask(pickle.dumps(call), deadline_s))
        except TimeoutError:
            raise WorkerLost(f"took longer than {deadline_s:g} s") from None
        except ValueError as error:
            raise WorkerLost(f"answered by something that is no score ({reason(error)})") from error
        if len(scores) != call.count:
            raise WorkerLost(f"answered with {len(scores)} scores for {call.count} rollouts")
        return scores

    async def end(self, patience_s: float = 0.0) -> str:
        """Kill it with everything that it has started, after a moment in which it may end by itself. Idempotent.

        Returns how it ended.
        """
        if self._ending is None:
            self._ending = asyncio.create_task(self._end(patience_s))
        return await asyncio.shield(self._ending)

    async def _ask(self, message: bytes, within_s: float) -> bytes:
        """Raises WorkerLost when it ends meanwhile, TimeoutError."""
        try:
            async with asyncio.timeout(within_s):
                self._writer.write(framed(message))
                await self._writer.drain()
                (size,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
                if size > LARGEST_ANSWER:
                    raise WorkerLost(f"answered with {size} bytes, more than {LARGEST_ANSWER}")
                return await self._reader.readexactly(size)
        except (OSError, asyncio.IncompleteReadError) as error:
            # TimeoutError is an OSError.
            if isinstance(error, TimeoutError):
                raise
            raise WorkerLost(await self.end(END_S)) from None

    async def _end(self, patience_s: float) -> str:
        keeper, told = self._keeper, b""
        assert keeper.stdin is not None
        assert keeper.stdout is not None
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                told = await keeper.stdout.read()
        keeper.stdin.close()
        try:
            async with asyncio.timeout(END_S):
                told = told or await keeper.stdout.read()
                await keeper.wait()
        except TimeoutError:
            log.warning("keeper %d of a reward's worker does not end; it is killed", keeper.pid)
            with suppress(ProcessLookupError):
                keeper.kill()
            await keeper.wait()
        if not told:
            # Killed before it could end what its worker had started.
            await asyncio.to_thread(end_marked, MARK, self._mark)
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()
        return self._sentence(json.loads(told or b"{}"))

    def _sentence(self, told: dict[str, Any]) -> str:
        if left := told.get("left"):
            log.warning("processes %s of a reward were killed and do not end", left)
        match told:
            case {"memory": used}:
                return (
                    f"held {used >> 20} MiB of memory; producer.reward_memory_mb allows {self._memory_mb} for one "
                    f"worker and all that it starts"
                )
            case {"exit": code}:
                return f"ended its worker process (exit code {code})"
            case {"signal": number}:
                return f"ended its worker process ({_name_of(number)})"
            case {}:
                return "was ended with its worker process"


def _name_of(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have none
        return f"signal {number}"


class Pool:
    """At most `workers` processes, which know one environment and its rewards, for one call at a time each."""

    def __init__(self, environment: EnvironmentConfig, *, workers: int, deadline_s: float, memory_mb: int) -> None:
        self._environment, self._deadline_s, self._memory_mb = environment, deadline_s, memory_mb
        self._count = workers
        name = environment.called
        self.lanes = tuple(Lane(f"score/{name}/{number}", "start", waits_for="rollout") for number in range(workers))
        """One per call that is under way, whichever worker it has."""
        self._free = list(self.lanes)
        self._seats = asyncio.Semaphore(workers)
        self._idle: list[Worker] = []
        self._workers: set[Worker] = set()
        self._work: set[asyncio.Task[Any]] = set()
        self._closed = False

    async def start(self) -> None:
        """Start all workers, so that they are ready when the first rollout ends."""
        await asyncio.gather(*(self._seated(self._warm(), "start") for _ in range(self._count)))

    async def call(self, call: Call) -> list[Score]:
        """A Score for each rollout of the call; with the reason in each when the worker did not answer.

        Who is cancelled while a worker computes goes without the answer; the worker goes on till its deadline, and
        nobody waits for another one to load.
        """
        return await self._seated(self._answer(call), "score")

    async def close(self) -> None:
        """End all workers. Calls that are open end as failures. Idempotent."""
        self._closed = True
        while self._workers or self._work:
            await asyncio.gather(*(self._lose(worker) for worker in list(self._workers)))
            if self._work:
                await asyncio.wait(self._work, timeout=1.0)

    async def _seated(self, work: Coroutine[Any, Any, T], phase: str) -> T:
        """Do this once a worker is free. From then on it is done to its end, whoever still waits for it."""
        try:
            await self._seats.acquire()
        except asyncio.CancelledError:
            work.close()
            raise
        lane = self._free.pop()
        lane.enter(phase)
        task = asyncio.create_task(work)
        self._work.add(task)
        task.add_done_callback(partial(self._stand_up, lane))
        return await asyncio.shield(task)

    def _stand_up(self, lane: Lane, task: asyncio.Task[Any]) -> None:
        lane.wait()
        self._free.append(lane)
        self._work.discard(task)
        self._seats.release()

    async def _warm(self) -> None:
        try:
            self._idle.append(await self._worker())
        except WorkerLost as lost:
            if self._closed:
                return
            log.warning("a reward's worker process did not start: it %s; its next call tries again", lost)

    async def _answer(self, call: Call) -> list[Score]:
        worker: Worker | None = None
        try:
            worker = await self._worker()
            scores = await worker.ask(call, self._deadline_s)
        except WorkerLost as lost:
            if worker is not None:
                await self._lose(worker)
            return [Score(failure=f"reward {lost}")] * call.count
        self._idle.append(worker)
        return scores

    async def _worker(self) -> Worker:
        """One that is ready. Raises WorkerLost."""
        while self._idle:
            worker = self._idle.pop()
            if not worker.lost:
                return worker
            await self._lose(worker)
        if self._closed:
            raise WorkerLost("was not reached: the producer ends")
        try:
            worker = await Worker.start(self._memory_mb)
        except OSError as error:
            raise WorkerLost(f"has no worker process ({reason(error)})") from error
        self._workers.add(worker)
        try:
            await worker.load(self._environment)
        except WorkerLost:
            await self._lose(worker)
            raise
        return worker

    async def _lose(self, worker: Worker) -> None:
        await worker.end()
        self._workers.discard(worker)
