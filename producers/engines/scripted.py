"""An engine without a model: seeded random tokens at a simulated pace, for tests and capacity planning.

Wait graph: the decode loop waits for a request or for `close` (woken by `_wake`), never for anything else but its
own simulated step; each `generate` waits for its future, which the loop, `abort` or `close` completes.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from broker.messages import FinishReason
from headrace.errors import EngineError
from headrace.telemetry.phases import Lane, Place
from headrace.version import PolicyVersion
from producers.engines.api import Completion, EngineStats, Progress, Request
from producers.engines.seeds import request_seed
from producers.engines.spans import SpanRecorder, recomputes
from weightsync.manifest import Layout


@dataclass(slots=True, eq=False)
class _Sequence:
    request: Request
    done: asyncio.Future[Completion]
    asked_at: float
    tokens: list[int] = field(default_factory=list)
    length: int = 0
    random: np.random.Generator | None = None
    spans: SpanRecorder = field(default_factory=SpanRecorder)
    prompt_version: PolicyVersion | None = None
    """The version that its keys and values would be of, were there a model."""
    slot_at: float = 0.0
    first_at: float = 0.0


class ScriptedEngine:
    """Samples uniformly from its vocabulary, so that each log-prob is exactly -log(vocabulary).

    Completion lengths are log-normal around `length_mean` (all equal with `length_sigma` 0) and cut at
    `max_new_tokens`. There is no text, so stop strings never match; the last token of a completion that ends by
    itself is the first stop token, where there is one. Waiting requests are bounded by the open `generate` calls.
    """

    def __init__(
        self,
        *,
        slots: int = 8,
        context_length: int = 512,
        vocabulary: int = 256,
        length_mean: float = 16.0,
        length_sigma: float = 0.5,
        step_s: float = 0.0,
        kv: str = "keep",
        seed: int = 0,
    ) -> None:
        """`kv`: as in the torch engine, for spans and counters; it takes no time. Raises ConfigError."""
        self._slots = slots
        self._context_length = context_length
        self._vocabulary = vocabulary
        self._length_mean = length_mean
        self._length_sigma = length_sigma
        self._step_s = step_s
        self._recompute = recomputes(kv)
        self._seed = seed
        self._version: PolicyVersion | None = None
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._open: dict[str, _Sequence] = {}
        """By request id: those whose `generate` waits."""
        self._wake = asyncio.Event()
        self._paused = False
        """It has no turn on its device."""
        self._empty = asyncio.Event()
        """Nothing is decoded now."""
        self._loop: asyncio.Task[None] | None = None
        self._closed = False
        self._buffers: dict[Layout, npt.NDArray[np.uint8]] = {}
        self._decode_steps = self._decoded_tokens = self._prefill_tokens = self._busy_slot_steps = 0
        self._recomputed_tokens = 0
        self.lane = Lane("engine", "wait_start", place=Place("device", "simulated", 1))

    @property
    def slots(self) -> int:
        return self._slots

    @property
    def context_length(self) -> int:
        return self._context_length

    @property
    def version(self) -> PolicyVersion | None:
        return self._version

    async def start(self) -> None:
        self._loop = asyncio.create_task(self._decode(), name="scripted-decode")
        self._loop.add_done_callback(self._on_end)

    async def generate(self, request: Request) -> Completion:
        if self._closed or self._loop is None:
            raise EngineError("the scripted engine is not running")
        if self._version is None:
            raise EngineError("the scripted engine has no policy version yet; commit one first")
        sequence = _Sequence(request, asyncio.get_running_loop().create_future(), time.perf_counter())
        self._waiting.append(sequence)
        self._open[request.request_id] = sequence
        self._wake.set()
        try:
            return await sequence.done
        finally:
            self._open.pop(request.request_id, None)
            self._forget(sequence)

    def abort(self, request_id: str) -> None:
        for sequence in (*self._waiting, *self._running):
            if sequence.request.request_id == request_id:
                self._finish(sequence, "abort")

    def progress(self, request_id: str) -> Progress | None:
        sequence = self._open.get(request_id)
        if sequence is None:
            return None
        return Progress(len(sequence.tokens), sequence.spans.oldest)

    def back_buffer(self, layout: Layout) -> npt.NDArray[np.uint8]:
        """Any layout fits: there is no model."""
        if layout not in self._buffers:
            self._buffers = {layout: np.zeros(layout.nbytes, np.uint8)}
        return self._buffers[layout]

    def map(self, layout: Layout, data: npt.NDArray[np.uint8]) -> None:
        """Any layout fits."""

    async def commit(self, version: PolicyVersion) -> float:
        """Every await of the loop is a step boundary, so the swap takes no time."""
        if self._recompute and version != self._version:
            for sequence in self._running:
                sequence.prompt_version = version
                # The newest token is decoded in the next step, as it would be without a commit.
                self._recomputed_tokens += len(sequence.request.prompt_ids_P) + max(0, len(sequence.tokens) - 1)
        self._version = version
        return 0.0

    async def release(self) -> None:
        self._paused = True
        self._wake.set()
        while self._running and not self._closed:
            self._empty.clear()
            await self._empty.wait()
        if self._closed:
            raise EngineError("the scripted engine is not running")

    def resume(self) -> None:
        self._paused = False
        self._wake.set()

    def stats(self) -> EngineStats:
        return EngineStats(
            slots=self._slots,
            busy_slots=len(self._running),
            waiting=len(self._waiting),
            decode_steps=self._decode_steps,
            decoded_tokens=self._decoded_tokens,
            prefill_tokens=self._prefill_tokens,
            busy_slot_steps=self._busy_slot_steps,
            recomputed_tokens=self._recomputed_tokens,
        )

    async def close(self) -> None:
        self._closed = True
        for sequence in (*self._waiting, *self._running):
            self._finish(sequence, "abort")
        self._wake.set()
        if self._loop is not None:
            # A simulated step may be as long as one likes; nobody waits for its end.
            self._loop.cancel()
            await asyncio.wait([self._loop])

    def _on_end(self, loop: asyncio.Task[None]) -> None:
        """A decode loop that broke must not leave anybody waiting."""
        self._closed = True
        self._empty.set()
        reason = "was cancelled" if loop.cancelled() else f"broke: {loop.exception()}"
        for sequence in (*self._waiting, *self._running):
            if not sequence.done.done():
                sequence.done.set_exception(EngineError(f"the scripted engine's decode loop {reason}"))

    async def _decode(self) -> None:
        while not self._closed:
            self._fill_slots()
            if not self._running:
                self._empty.set()
                self._wake.clear()
                self.lane.wait()
                await self._wake.wait()
                continue
            self.lane.enter("decode")
            await asyncio.sleep(self._step_s)
            self._step()

    def _fill_slots(self) -> None:
        while self._waiting and len(self._running) < self._slots and not self._paused:
            sequence = self._waiting.popleft()
            self._begin(sequence)
            self._running.append(sequence)
            self._prefill_tokens += len(sequence.request.prompt_ids_P)
            if sequence.length == 0:
                self._finish(sequence, "length")

    def _begin(self, sequence: _Sequence) -> None:
        assert self._version is not None
        sampling = sequence.request.sampling
        random = np.random.default_rng(request_seed(sequence.request, self._seed))
        mean = math.log(self._length_mean) - self._length_sigma**2 / 2
        room = self._context_length - len(sequence.request.prompt_ids_P)
        drawn = max(1, round(random.lognormal(mean, self._length_sigma)))
        sequence.length = max(0, min(drawn, sampling.max_new_tokens, room))
        sequence.random = random
        sequence.prompt_version = self._version
        sequence.slot_at = time.perf_counter()

    def _step(self) -> None:
        """One token for every running sequence."""
        if not self._running:
            return  # all were aborted meanwhile
        assert self._version is not None
        self._decode_steps += 1
        self._busy_slot_steps += len(self._running)
        self._decoded_tokens += len(self._running)
        for sequence in tuple(self._running):
            sampling = sequence.request.sampling
            assert sequence.random is not None
            sequence.spans.note(len(sequence.tokens), self._version, sequence.prompt_version)
            token = int(sequence.random.integers(self._vocabulary))
            ends = len(sequence.tokens) + 1 == sequence.length
            cut = sequence.length in (
                sampling.max_new_tokens,
                self._context_length - len(sequence.request.prompt_ids_P),
            )
            if ends and not cut and sampling.stop_token_ids:
                token = sampling.stop_token_ids[0]
            sequence.first_at = sequence.first_at or time.perf_counter()
            sequence.tokens.append(token)
            if token in sampling.stop_token_ids or (ends and not cut):
                self._finish(sequence, "stop")
            elif ends:
                self._finish(sequence, "length")

    def _finish(self, sequence: _Sequence, reason: FinishReason) -> None:
        self._forget(sequence)
        if sequence.done.done():
            return
        now = time.perf_counter()
        count = len(sequence.tokens)
        slot_at = sequence.slot_at or now
        sequence.done.set_result(
            Completion(
                request_id=sequence.request.request_id,
                token_ids_N=np.array(sequence.tokens, np.int32),
                logprobs_N=np.full(count, -math.log(self._vocabulary), np.float32),
                spans=sequence.spans.close(count),
                finish_reason=reason,
                queue_s=slot_at - sequence.asked_at,
                decode_s=now - slot_at,
                first_token_s=max(0.0, sequence.first_at - sequence.asked_at),
            )
        )

    def _forget(self, sequence: _Sequence) -> None:
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        if sequence in self._running:
            self._running.remove(sequence)
