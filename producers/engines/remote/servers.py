"""Several servers as one engine, each with its own version of the weights.

Wait graph. `generate` waits for its job. A job waits in one queue until a server has room for it (woken by `pump`,
which runs whenever a job comes or ends or a server changes), then for its server's answer or for the server's end.
`commit` waits for the updates of all servers, each of which pauses for its own load alone and has a deadline. The loops
of the servers stand in `producers/engines/remote/replica.py`. No server waits for another.
"""

from __future__ import annotations

import abc
import asyncio
import json
import logging
import secrets
import time
from dataclasses import replace
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from headrace.errors import EngineError, ModelError
from headrace.telemetry.phases import Lane, Place
from headrace.version import PolicyVersion
from producers.engines.api import Completion, EngineStats, Progress, Request, SamplingParams
from producers.engines.remote.buffers import Buffers
from producers.engines.remote.dispatch import Counts, Dispatcher
from producers.engines.remote.job import MOST_TOKENS, Job
from producers.engines.remote.refill import group_key
from producers.engines.remote.replica import Offer, Replica
from producers.engines.remote.spans import Kv, Labels
from producers.engines.remote.staged import sweep
from producers.engines.seeds import request_seed
from producers.engines.stops import Decode
from weightsync.manifest import Layout

log = logging.getLogger(__name__)

SPLIT_TOKENS = 64
"""Sampled tokens, of requests that have ended, from which the split between prompts and decoding is estimated anew."""
SAMPLE_S = 0.25
"""Between two counts of the busy slots."""

R = TypeVar("R", bound=Replica)


class ServersEngine(abc.ABC, Generic[R]):
    """Decodes on servers, at most `slots` requests at once. What a kind of server needs stands in its subclass."""

    kind: str
    """The engine's name, for messages."""
    makes: str
    """Of its servers, for messages."""

    def __init__(
        self,
        folder: Path,
        kv: Kv,
        *,
        slots: int,
        context_length: int,
        seed: int,
        decode: Decode | None,
        devices: int,
    ) -> None:
        """`folder`: the model's. `decode`: token ids to text, for stop strings that begin in one request to a server
        and end in the next. `devices`: of each server.
        """
        self._folder, self._devices = folder, devices
        self._slots, self._context_length, self._seed = slots, context_length, seed
        self._buffers = Buffers(folder)
        self._labels = Labels(f"local.{secrets.token_hex(4)}")
        self._dispatcher = Dispatcher(kv, decode, self._changed)
        self._replicas: tuple[R, ...] = ()
        self._keepers: list[asyncio.Task[None]] = []
        self._jobs: dict[str, Job] = {}
        """By request id: those whose `generate` waits."""
        self._version: PolicyVersion | None = None
        self._committing = asyncio.Lock()
        self._broken: EngineError | None = None
        self._started = self._closed = False
        self._vocabulary = _vocabulary(folder)
        self._turned = asyncio.Event()
        """Set whenever a server changes."""
        self._steps = self._busy_steps = 0
        self._counted = Counts()
        """When the shares below were set."""
        self._shares = [("decode", 1.0)]
        self.lane = Lane("engine", "start", place=Place("device", "server", 1, estimated=True))

    @property
    def replicas(self) -> tuple[R, ...]:
        return self._replicas

    @property
    def slots(self) -> int:
        return self._slots

    @property
    def context_length(self) -> int:
        return self._context_length

    @property
    def version(self) -> PolicyVersion | None:
        """The oldest that a serving server has; the committed one where none serves."""
        serving = (replica.version for replica in self.replicas if replica.state in ("serving", "updating"))
        return min((version for version in serving if version is not None), default=self._version)

    def join_run(self, run_id: str, folder: str) -> None:
        """Before `start`: whose versions these are."""
        self._buffers.run_id = run_id
        self._labels = Labels(f"{run_id}.{secrets.token_hex(4)}")

    async def start(self) -> None:
        """Waits until every server has answered. Raises EngineError with why one does not, or cannot be used."""
        await asyncio.to_thread(sweep)
        self._dispatcher.labels = self._labels
        self._replicas = self._dispatcher.replicas = self._make_replicas()
        self._keepers = [asyncio.create_task(one.keep(), name=f"keep-{one.name}") for one in self.replicas]
        self._keepers.append(asyncio.create_task(self._sample(), name=f"{self.kind}-sample"))
        try:
            for replica in self.replicas:
                await replica.begun.wait()
                if replica.state == "lost":
                    raise EngineError(f"server {replica.name} cannot be used: {replica.why}")
                await self._accept(replica)
        except BaseException:
            await self.close()
            raise
        self._dispatcher.slots = self._slots
        self.lane.place.devices = self._devices * len(self._replicas)
        self._fit()
        self._started = True
        self._changed()

    @abc.abstractmethod
    def _make_replicas(self) -> tuple[R, ...]:
        """One for each server; the labels are those that `join_run` has set."""

    @abc.abstractmethod
    async def _accept(self, replica: R) -> None:
        """Ask a server that has answered whether it gives what is needed. Raises EngineError."""

    @abc.abstractmethod
    def _fit(self) -> None:
        """All servers were accepted: no more slots, and no longer context, than they have."""

    @abc.abstractmethod
    def _fault(self, sampling: SamplingParams) -> str | None:
        """Why requests with these values cannot be sampled, or None."""

    async def generate(self, request: Request) -> Completion:
        job = self._admit(request)
        if job.limit <= 0:
            job.complete("length", time.perf_counter())
            return job.done.result()
        self._jobs[request.request_id] = job
        self._dispatcher.submit(job)
        try:
            return await job.done
        finally:
            self._jobs.pop(request.request_id, None)
            self._dispatcher.drop(job)

    def abort(self, request_id: str) -> None:
        job = self._jobs.get(request_id)
        if job is not None:
            self._dispatcher.abort(job)

    def progress(self, request_id: str) -> Progress | None:
        job = self._jobs.get(request_id)
        return job.progress() if job is not None else None

    def back_buffer(self, layout: Layout) -> npt.NDArray[np.uint8]:
        return self._buffers.back(layout)

    async def commit(self, version: PolicyVersion) -> float:
        """Returns the seconds of the server that stood still longest. One that fails is out until it is reloaded.

        Without a staged version the servers' own weights are called so.
        """
        async with self._committing:
            self._check_running()
            offer = Offer(version, await self._buffers.turn(version))
            first = self._version is None
            self._version = version
            seconds = await asyncio.gather(*(replica.offer(offer) for replica in self.replicas))
            if first:
                await self._one_serves()
            return max(seconds, default=0.0)

    def stats(self) -> EngineStats:
        counts = self._dispatcher.counts
        return EngineStats(
            slots=self._slots,
            busy_slots=min(self._dispatcher.open, self._slots),
            waiting=len(self._dispatcher.waiting) + max(0, self._dispatcher.open - self._slots),
            decode_steps=self._steps,
            decoded_tokens=counts.decoded,
            prefill_tokens=counts.prefilled,
            busy_slot_steps=self._busy_steps,
            recomputed_tokens=counts.recomputed,
        )

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        await self._dispatcher.close()
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        await asyncio.gather(*(replica.close() for replica in self.replicas))
        self._buffers.close()

    def _admit(self, request: Request) -> Job:
        """Raises EngineError."""
        self._check_running()
        if self._version is None:
            raise EngineError(f"the {self.kind} engine has no policy version yet; commit one first")
        prompt, sampling = request.prompt_ids_P, request.sampling
        if len(prompt) == 0:
            raise EngineError(f"request {request.request_id} has an empty prompt")
        if prompt.min() < 0 or prompt.max() >= self._vocabulary:
            # It would end the server's scheduler, and all that runs there.
            raise EngineError(
                f"request {request.request_id} holds token {prompt.max()}, beyond the model's vocabulary of "
                f"{self._vocabulary}"
            )
        if fault := self._fault(sampling):
            raise EngineError(fault)
        return Job(
            request=request,
            key=group_key(request.request_id, prompt.tobytes()),
            seed=request_seed(request, self._seed),
            limit=min(sampling.max_new_tokens, self._context_length - len(prompt)),
            done=asyncio.get_running_loop().create_future(),
            asked_at=time.perf_counter(),
            vocabulary=self._vocabulary,
        )

    def _check_running(self) -> None:
        if self._broken is not None:
            raise self._broken
        if self._closed or not self._started:
            raise EngineError(f"the {self.kind} engine is not running")

    async def _one_serves(self) -> None:
        """The first version counts as committed once a server has it. Raises EngineError when none is left."""
        while self._broken is None and not any(replica.state == "serving" for replica in self.replicas):
            self._turned.clear()
            await self._turned.wait()
        self._check_running()

    def _changed_replica(self) -> None:
        """A server changed: there may be room, or none may be left."""
        if self._started and not self._closed and all(replica.state == "lost" for replica in self.replicas):
            reasons = "; ".join(f"{replica.name}: {replica.why}" for replica in self.replicas)
            self._broken = EngineError(f"no {self.makes} server is left ({reasons})")
            self._dispatcher.fail(self._broken)
        self._turned.set()
        self._dispatcher.pump()

    def _changed(self) -> None:
        phase = self._phase()
        if phase == "decode":
            self.lane.enter_shared(self._shares)
        elif phase == "wait":
            self.lane.wait()
        else:
            self.lane.enter(phase)

    def _phase(self) -> str:
        """What the whole does. Time in which no server serves is waiting, like that without tasks."""
        states = {replica.state for replica in self.replicas}
        if self._version is None or not self._started:
            return "wait_start" if self._started else "start"
        if self._dispatcher.open:
            return "decode" if "serving" in states else "swap"
        return "wait_servers" if self._dispatcher.waiting else "wait"

    async def _sample(self) -> None:
        """Counts busy slots from time to time: servers do not tell of their steps."""
        while True:
            await asyncio.sleep(SAMPLE_S)
            if busy := min(self._dispatcher.open, self._slots):
                self._steps += 1
                self._busy_steps += busy
                self._split(busy)

    def _split(self, busy: int) -> None:
        """Estimate what of the time goes to prompts, by the tokens of the requests that have ended lately."""
        now, before = self._dispatcher.counts, self._counted
        decoded = now.decoded - before.decoded
        if decoded < SPLIT_TOKENS:
            return
        prefilled, recomputed = now.prefilled - before.prefilled, now.recomputed - before.recomputed
        together = busy / max(1, sum(replica.state == "serving" for replica in self.replicas))
        self._shares = self._dispatcher.rates.shares(prefilled, recomputed, decoded, together)
        self._counted = replace(now)
        self._changed()


def _vocabulary(folder: Path) -> int:
    """Of the model; no bound where its folder does not say."""
    try:
        found = json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"model.path: {folder}/config.json cannot be read: {error}") from error
    text = found.get("text_config") or found
    return int(text.get("vocab_size") or MOST_TOKENS)
