"""The engine seam: a prompt goes in, sampled tokens with behaviour log-probs and version spans come out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from broker.messages import FinishReason, Float32, Int32, VersionSpan
from headrace.version import PolicyVersion
from weightsync.manifest import Layout


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one completion is sampled. The defaults sample from the model's own distribution."""

    max_new_tokens: int
    temperature: float = 1.0
    """0 is greedy; the log-probs are then those of temperature 1."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    stop_token_ids: tuple[int, ...] = ()
    """The sequence ends with (and includes) the first of these."""
    stop: tuple[str, ...] = ()
    """The sequence ends with the token that completes one of these strings."""
    seed: int | None = None
    """Fixes this request's random numbers, whatever else is in the batch."""


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    request_id: str
    prompt_ids_P: Int32
    sampling: SamplingParams


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """N sampled tokens. `spans` index into these N tokens and cover them all."""

    request_id: str
    token_ids_N: Int32
    logprobs_N: Float32
    """Log-probability of each token under the distribution it was sampled from (after temperature, top-k, top-p)."""
    spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    queue_s: float
    """Seconds from `generate` until it had a slot."""
    decode_s: float
    """Seconds from slot to last token."""
    first_token_s: float = 0.0
    """Seconds from `generate` to its first token; 0 where the engine does not say."""
    why: str = ""
    """It ended with "abort", where the engine knows."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since start; a reader takes differences."""

    slots: int
    busy_slots: int
    waiting: int
    decode_steps: int
    decoded_tokens: int
    prefill_tokens: int
    busy_slot_steps: int
    """Sum over decode steps of the slots that held a sequence (prefill counts)."""
    recomputed_tokens: int = 0
    """Tokens whose keys and values were computed again after a commit; not in `prefill_tokens`."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far something is whose tokens still come."""

    sampled: int
    oldest: PolicyVersion | None = None
    """The version of its first token; None before that."""


@runtime_checkable
class TellsProgress(Protocol):
    """What an engine may offer besides. Without it nobody knows how old the tokens of an open request are."""

    def progress(self, request_id: str) -> Progress | None:
        """Of a request that waits or decodes; None for any other."""
        ...


@runtime_checkable
class JoinsRun(Protocol):
    """What an engine may offer besides, where others can see whose it is."""

    def join_run(self, run_id: str, folder: str) -> None:
        """Once, before `start`. `folder` is the run's own on this machine, "" where there is none."""
        ...


@runtime_checkable
class SharesDevice(Protocol):
    """What an engine may offer besides: its device is another's between its turns. It has a turn from `start` on."""

    async def release(self) -> None:
        """Begin nothing more, end what decodes, free the cache's memory. Requests wait; versions are committed.

        Raises EngineError when the engine is closed or broken.
        """
        ...

    def resume(self) -> None:
        """It has a turn."""
        ...


class Engine(Protocol):
    """One generation engine of one producer process. All methods are called on the event loop's thread."""

    @property
    def slots(self) -> int: ...

    @property
    def context_length(self) -> int:
        """Prompt and completion together may not be longer than this."""
        ...

    @property
    def version(self) -> PolicyVersion | None:
        """The committed version; None until the first commit."""
        ...

    async def start(self) -> None:
        """Make ready; begins its decode loop. Raises EngineError or ModelError."""
        ...

    async def generate(self, request: Request) -> Completion:
        """Queue the request and wait for its completion. Raises EngineError when the engine is closed or broken."""
        ...

    def abort(self, request_id: str) -> None:
        """End it now; its `generate` returns what it has, with finish reason "abort". Unknown ids are ignored."""
        ...

    def back_buffer(self, layout: Layout) -> npt.NDArray[np.uint8]:
        """The flat buffer of `layout.nbytes` bytes into which the next version is staged while decoding goes on.

        Raises WeightError when the layout does not fit the engine's model.
        """
        ...

    async def commit(self, version: PolicyVersion) -> float:
        """Swap all tensors at one decode-step boundary; the old front becomes the back buffer.

        Returns the seconds for which decoding stood still.
        """
        ...

    def stats(self) -> EngineStats: ...

    async def close(self) -> None:
        """Stop decoding; open `generate` calls end with "abort". Idempotent."""
        ...
