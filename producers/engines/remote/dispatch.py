"""Jobs on their way to servers: one queue, a server chosen for each, and what becomes of an answer or its absence.

A job whose server fails goes on elsewhere behind the tokens that its answers have brought. Servers answer once, when a
request has ended: what one had sampled of a request that it did not answer is dropped, and sampled anew under the other
server's version. A job that goes on comes before those that have not begun.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass

from broker.messages import FinishReason
from headrace.errors import EngineError
from producers.engines.remote.answers import Generated
from producers.engines.remote.http import ServerBroken, ServerGone, ServerRefused
from producers.engines.remote.job import Job
from producers.engines.remote.rates import Rates
from producers.engines.remote.refill import choose
from producers.engines.remote.replica import Replica
from producers.engines.remote.spans import Kv, Labels
from producers.engines.stops import Decode

log = logging.getLogger(__name__)

MOST_TRIES = 4
"""Requests of one job that may come to nothing."""
FAULTS_OF_REQUESTS = (400, 413, 422)
"""Status of an answer that says what is wrong with the request; any other refusal is one of all requests."""
ABORT_S = 5.0
"""For a server to hand over what an aborted request has."""


@dataclass(frozen=True, slots=True)
class End:
    """Of a job. `why`: of an "abort" that nobody here asked for."""

    reason: FinishReason
    why: str = ""


@dataclass(slots=True)
class Counts:
    """Since start, of requests that have ended."""

    decoded: int = 0
    prefilled: int = 0
    recomputed: int = 0


class Dispatcher:
    """For one event loop. `changed` is called whenever what is open changes."""

    def __init__(self, kv: Kv, decode: Decode | None, changed: Callable[[], None]) -> None:
        self.replicas: Sequence[Replica] = ()
        self.labels = Labels("")
        self.slots = 1
        """Requests open at all servers together, at most."""
        self.counts = Counts()
        self.rates = Rates()
        self.waiting: deque[Job] = deque()
        self._kv, self._decode, self._changed = kv, decode, changed
        self._sends: dict[Job, tuple[asyncio.Task[None], Replica, str]] = {}
        self._asides: set[asyncio.Task[None]] = set()
        self._nonce = secrets.token_hex(4)
        self._numbers = itertools.count()
        self._closed = False

    @property
    def open(self) -> int:
        """Jobs that a server has."""
        return len(self._sends)

    def submit(self, job: Job) -> None:
        self.waiting.append(job)
        self.pump()

    def pump(self) -> None:
        """Hand out what waits, as long as a server has room."""
        while self.waiting and len(self._sends) < self.slots and not self._closed:
            by_name = {replica.name: replica for replica in self.replicas if replica.takes}
            room = {name: (replica.open, replica.limit) for name, replica in by_name.items()}
            chosen = choose(self.waiting[0].key, room)
            if chosen is None:
                break
            self._begin(self.waiting.popleft(), by_name[chosen])
        self._changed()

    def abort(self, job: Job) -> None:
        """It ends with what it has; what its server has of it is waited for, but briefly."""
        if job.aborted:
            return
        job.aborted = True
        if job not in self._sends:
            self.drop(job)
            job.complete("abort", time.perf_counter())
            return
        _, replica, rid = self._sends[job]
        self._aside(self._abort(job, replica, rid))

    def drop(self, job: Job) -> None:
        """Nobody waits for it any more. Its server is told by the end of the connection."""
        if job in self.waiting:
            self.waiting.remove(job)
        if job in self._sends:
            self._sends[job][0].cancel()

    def fail(self, error: EngineError) -> None:
        """No server is left."""
        for job in (*self.waiting, *self._sends):
            if not job.done.done():
                job.done.set_exception(error)
            self.drop(job)

    async def close(self) -> None:
        """All jobs end with "abort" and the tokens that are here. Idempotent."""
        self._closed = True
        now = time.perf_counter()
        tasks = [*(task for task, _, _ in self._sends.values()), *self._asides]
        for job in (*self.waiting, *self._sends):
            job.complete("abort", now)
        self.waiting.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, job: Job, replica: Replica) -> None:
        job.asked = replica.version
        job.slot_at = job.slot_at or time.perf_counter()
        replica.open += 1
        rid = f"{self._nonce}-{next(self._numbers)}"
        task = asyncio.create_task(self._send(job, replica, rid), name=f"request-{rid}")
        self._sends[job] = task, replica, rid

    async def _send(self, job: Job, replica: Replica, rid: str) -> None:
        again = False
        try:
            again = await self._ask(job, replica, rid)
        except Exception as error:
            # Nobody awaits this task: whoever waits for the job has to hear of a bug here.
            if not job.done.done():
                job.done.set_exception(error)
            raise
        finally:
            self._sends.pop(job, None)
            replica.open -= 1
            if again and not job.done.done() and not self._closed:
                self.waiting.appendleft(job)
            self.pump()

    async def _ask(self, job: Job, replica: Replica, rid: str) -> bool:
        """One request; whether there has to be another one."""
        assert job.asked is not None
        label, life, start = self.labels.of(job.asked), replica.life, time.perf_counter()
        try:
            got = await _answer(replica, job, rid, label, life)
            end = self._take(job, replica, got, time.perf_counter() - start)
        except (ServerGone, ServerBroken, ServerRefused) as error:
            if isinstance(error, ServerRefused) and error.status in FAULTS_OF_REQUESTS:
                log.warning("server %s refused request %s: %s", replica.name, job.request.request_id, error)
                end = End("abort", f"server {replica.name} refused it: {error}")
            else:
                if not life.done():
                    replica.failed(error)
                end = self._nothing(job, str(error))
        if end is not None:
            job.complete(end.reason, time.perf_counter(), end.why)
        return end is None

    def _take(self, job: Job, replica: Replica, got: Generated, seconds: float) -> End | None:
        """How the job has ended; None where it has not. `seconds`: since its server was asked. Raises ServerBroken."""
        before, asked = len(job.tokens), job.asked
        count = job.add(got, self.labels, self._kv, replica.version)
        if count is None:
            replica.answered(0)
            return self._nothing(job, f"what server {replica.name} sampled is of no known version")
        self._count(job, got, before, count, seconds)
        changes = max(0, len(got.meta_info.weight_versions or ()) - 1) if self._kv == "recompute" else 0
        replica.answered(max(0, got.meta_info.num_retractions - changes))
        reason = job.ended(got, self._decode, before)
        if reason is not None:
            return End(reason)
        if count == 0 and replica.version == asked and replica.takes:
            # Else new weights ended it in its server's queue, which may come as often as there are new ones.
            finish = got.meta_info.finish_reason
            said = finish.message or finish.type if finish is not None else ""
            return self._nothing(job, f"server {replica.name} ended it without a token ({said})")
        return None

    def _nothing(self, job: Job, why: str) -> End | None:
        """A request came to nothing, for no reason of ours."""
        job.tries += 1
        if job.aborted:
            return End("abort")
        if job.tries >= MOST_TRIES:
            return End("abort", f"{job.tries} requests came to nothing, the last one so: {why}")
        log.info("request %s is asked again: %s", job.request.request_id, why)
        return None

    def _count(self, job: Job, got: Generated, before: int, count: int, seconds: float) -> None:
        meta, counts = got.meta_info, self.counts
        computed = max(0, meta.prompt_tokens - meta.cached_tokens)
        self.rates.note(computed, count, seconds)
        counts.decoded += count
        if before:
            counts.recomputed += computed
        else:
            counts.prefilled += computed
        if self._kv == "recompute":
            prompt = len(job.request.prompt_ids_P)
            counts.recomputed += sum(prompt + span.start for span in job.spans if span.start > before)

    async def _abort(self, job: Job, replica: Replica, rid: str) -> None:
        try:
            async with asyncio.timeout(ABORT_S):
                await replica.abort(rid)
                await asyncio.wait([job.done])
        except (EngineError, TimeoutError):
            job.complete("abort", time.perf_counter())
            self.drop(job)

    def _aside(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._asides.add(task)
        task.add_done_callback(self._asides.discard)


async def _answer(replica: Replica, job: Job, rid: str, label: str, life: asyncio.Future[str]) -> Generated:
    """Raises ServerGone, ServerBroken, ServerRefused; ServerGone also when the server is found not to work."""
    call = asyncio.ensure_future(replica.ask(job, rid, label))
    try:
        await asyncio.wait((call, life), return_when=asyncio.FIRST_COMPLETED)
        if not call.done():
            raise ServerGone(f"server {replica.name} does not work: {life.result()}")
        return call.result()
    finally:
        call.cancel()
