"""The embedded engine: any Llama-like Hugging Face causal LM, decoded in slots in a thread of this process.

Wait graph: each `generate` waits for its future, `commit` for the swap's report; both are completed on the event loop
by what the decode thread reports (`producers/engines/decode_loop.py`), or failed when that thread breaks.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.errors import EngineError, ModelError
from headrace.telemetry.arithmetic import Roofline
from headrace.telemetry.phases import Lane, Place
from headrace.version import PolicyVersion
from producers.engines.api import Completion, EngineStats, Progress, Request
from producers.engines.decode_loop import Abort, Close, DecodeLoop, Event, Released, Submit, Swap, Swapped, Turn
from producers.engines.seeds import request_seed
from producers.engines.sequences import Sequence
from producers.engines.spans import recomputes
from producers.engines.stops import Decode
from producers.engines.traits import Traits
from producers.engines.weights import EngineWeights
from weightsync.manifest import Layout

log = logging.getLogger(__name__)


class TorchEngine:
    """Decodes `slots` sequences together and refills each slot the moment its sequence ends.

    The model of `folder` is there from `start` on, but nothing is sampled before a first `commit`; one without a
    staged back buffer names the version of the weights that are there.
    """

    def __init__(
        self,
        folder: Path,
        *,
        slots: int = 32,
        context_length: int = 512,
        dtype: str = "auto",
        device: str = "auto",
        threads: int = 1,
        seed: int = 0,
        prefill_budget: int = 256,
        prefill_gap: float = 2.5,
        kv: str = "keep",
        decode: Decode | None = None,
    ) -> None:
        """`prefill_budget`: tokens of prompts in one step at most, beside the one of each sequence that decodes.
        `prefill_gap`: while sequences decode, a step with tokens of prompts takes about as long as so many steps
        without, as far as was measured, and no longer. `kv`: whether a commit has running sequences "keep" their keys
        and values or "recompute" them. `decode`: token ids to text, for stop strings.

        Raises ModelError or ConfigError for an option out of range.
        """
        if prefill_budget < 1:
            raise ModelError(f"producer.engine_options.prefill_budget = {prefill_budget} must be at least 1")
        if not prefill_gap > 1:
            raise ModelError(f"producer.engine_options.prefill_gap = {prefill_gap} must be more than 1")
        self._slots = slots
        self._context_length = context_length
        self._dtype, self._device = dtype, device
        self._folder, self._threads, self._seed = folder, threads, seed
        self._budget, self._gap = prefill_budget, prefill_gap
        self._recompute = recomputes(kv)
        self._decode = decode
        self._version: PolicyVersion | None = None
        self._tickets = itertools.count()
        self._open: dict[int, tuple[Sequence, asyncio.Future[Completion]]] = {}
        self._named: dict[str, Sequence] = {}
        """By request id: those whose `generate` waits."""
        self._swap: asyncio.Future[float] | None = None
        self._released: asyncio.Future[None] | None = None
        """Completed once it holds nothing that it had for its turn; None while it has one."""
        self._committing = asyncio.Lock()
        self._preparing = ThreadPoolExecutor(1, "headrace-weights")
        self._thread: threading.Thread | None = None
        self._ended: asyncio.Event = asyncio.Event()
        self._broken: EngineError | None = None
        self._closed = False
        self.lane = Lane("engine", "start", place=Place("device", device, 1))
        self.roofline: Roofline | None = None
        """What its device was measured to reach; from `start` on."""

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
        self._event_loop = asyncio.get_running_loop()
        await self._event_loop.run_in_executor(self._preparing, self._build)
        self._thread = threading.Thread(target=self._run, name="headrace-decode", daemon=True)
        self._thread.start()

    async def generate(self, request: Request) -> Completion:
        sequence = self._admit(request)
        if sequence.limit <= 0:
            return sequence.complete("length", time.perf_counter())
        done: asyncio.Future[Completion] = self._event_loop.create_future()
        self._open[sequence.ticket] = sequence, done
        self._named[request.request_id] = sequence
        self.loop.send(Submit(sequence))
        try:
            return await done
        finally:
            self._named.pop(request.request_id, None)
            if self._open.pop(sequence.ticket, None) is not None:
                self.loop.send(Abort(sequence.ticket))  # the caller was cancelled

    def abort(self, request_id: str) -> None:
        for ticket, (sequence, _) in self._open.items():
            if sequence.request.request_id == request_id:
                self.loop.send(Abort(ticket))

    def progress(self, request_id: str) -> Progress | None:
        sequence = self._named.get(request_id)
        return sequence.progress() if sequence is not None else None

    def back_buffer(self, layout: Layout) -> npt.NDArray[np.uint8]:
        return self._weights.stage(layout)

    def map(self, layout: Layout, data: npt.NDArray[np.uint8]) -> None:
        self._weights.map(layout, data)

    async def commit(self, version: PolicyVersion) -> float:
        async with self._committing:
            self._check_running()
            if not self._weights.staged:
                return await self._swapped(Swap(version, lambda: None))
            prepared = await self._event_loop.run_in_executor(self._preparing, self._weights.prepare)
            seconds = await self._swapped(Swap(version, lambda: self._weights.swap(prepared)))
            await asyncio.to_thread(prepared.free)
            return seconds

    async def _swapped(self, swap: Swap) -> float:
        self._check_running()
        self._swap = self._event_loop.create_future()
        self.loop.send(swap)
        return await self._swap

    async def release(self) -> None:
        self._check_running()
        if self._released is None:
            self._released = self._event_loop.create_future()
            self.loop.send(Turn(has=False))
        await asyncio.shield(self._released)

    def resume(self) -> None:
        self._released = None
        self.loop.send(Turn(has=True))

    def stats(self) -> EngineStats:
        return self.loop.stats()

    async def traits(self) -> Traits:
        from producers.engines.torch_traits import traits

        self._check_running()
        assert self.roofline is not None
        return await asyncio.to_thread(traits, self.lane.place.device, self.roofline.dtype)

    async def close(self) -> None:
        self._closed = True
        if self._thread is not None and not self._ended.is_set():
            self.loop.send(Close())
            await self._ended.wait()
        self._preparing.shutdown(wait=False, cancel_futures=True)

    def _build(self) -> None:
        """Load the model and lay out weights and cache; takes seconds."""
        import torch

        from headrace.policy.dtype import compute_dtype
        from headrace.policy.intensity import measured, observe
        from headrace.policy.loading import load_model, model_width
        from headrace.policy.memory import keep_freed_memory
        from producers.engines.model_runner import ModelRunner
        from producers.engines.pace import Pace

        torch.set_num_threads(self._threads)
        keep_freed_memory()
        device = self._device
        if device == "auto":
            device = "cuda:0" if torch.cuda.is_available() else "cpu"
        self.lane.place.device = device
        dtype = compute_dtype(self._dtype, device, *model_width(self._folder), rows=self._slots)
        # Before the model, which takes the memory that this leaves.
        self.roofline = measured(device, dtype)
        model = load_model(self._folder, dtype, device)
        self._runner = ModelRunner(model, self._slots, self._context_length)
        self._weights = EngineWeights(model)
        observe(self.lane, device)
        self.loop = DecodeLoop(
            self._runner,
            slots=self._slots,
            pace=Pace(self._budget, self._gap, self._runner.wide_context),
            recompute=self._recompute,
            report=self._report,
            lane=self.lane,
            decode=self._decode,
        )

    def _admit(self, request: Request) -> Sequence:
        """Raises EngineError for a request that would break the batch it is in."""
        self._check_running()
        if self._version is None:
            raise EngineError("the torch engine has no policy version yet; commit one first")
        prompt, sampling = request.prompt_ids_P, request.sampling
        if len(prompt) == 0:
            raise EngineError(f"request {request.request_id} has an empty prompt")
        if prompt.min() < 0 or prompt.max() >= self._runner.vocabulary:
            raise EngineError(
                f"request {request.request_id} holds token {prompt.max()}, beyond the model's vocabulary of "
                f"{self._runner.vocabulary}"
            )
        if sampling.stop and self._decode is None:
            raise EngineError(f"request {request.request_id} has stop strings, for which the engine has no tokenizer")
        return Sequence(
            ticket=next(self._tickets),
            request=request,
            seed=request_seed(request, self._seed),
            limit=min(sampling.max_new_tokens, self._context_length - len(prompt)),
            asked_at=time.perf_counter(),
            prompt_key=prompt.tobytes(),
        )

    def _check_running(self) -> None:
        if self._broken is not None:
            raise self._broken
        if self._closed or self._thread is None:
            raise EngineError("the torch engine is not running")

    def _run(self) -> None:
        """The decode thread. Whatever breaks it must reach everybody who waits for it."""
        import torch

        self.lane.bind()
        torch.set_num_threads(self._threads)
        torch.set_flush_denormal(True)  # exp() of far-off scores is denormal, and then a hundred times slower
        broken: EngineError | None = None
        try:
            self.loop.run()
        except Exception as error:
            log.exception("the decode thread broke")
            broken = EngineError(f"the decode thread of the torch engine broke: {type(error).__name__}: {error}")
        self._post(self._on_end, broken)

    def _report(self, events: list[Event]) -> None:
        self._post(self._on_events, events)

    def _post(self, call: Callable[[Any], None], argument: object) -> None:
        try:
            self._event_loop.call_soon_threadsafe(call, argument)
        except RuntimeError:
            log.info("the event loop closed before the torch engine did; nobody waits for it any more")

    def _on_events(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Swapped):
                self._version = event.version
                if self._swap is not None and not self._swap.done():
                    self._swap.set_result(event.seconds)
                continue
            if isinstance(event, Released):
                if self._released is not None and not self._released.done():
                    self._released.set_result(None)
                continue
            _, done = self._open.pop(event.ticket, (None, None))
            if done is not None and not done.done():
                done.set_result(event.completion)

    def _on_end(self, broken: EngineError | None) -> None:
        self._broken = broken
        self._ended.set()
        reason = broken or EngineError("the torch engine was closed")
        waiting: list[asyncio.Future[Any]] = [done for _, done in self._open.values()]
        self._open.clear()
        waiting += [future for future in (self._swap, self._released) if future is not None]
        for future in waiting:
            if not future.done():
                future.set_exception(reason)
