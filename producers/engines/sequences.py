"""Sequences in decode slots, and what the next step computes: plain decisions without tensors."""

from __future__ import annotations

from collections.abc import Sequence as Listed
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from broker.messages import FinishReason
from headrace.version import PolicyVersion
from producers.engines.api import Completion, Progress, Request
from producers.engines.slot_attention import Chunk
from producers.engines.spans import SpanRecorder

Ints = npt.NDArray[np.int64]


@dataclass(slots=True, eq=False)
class Sequence:
    """One request on its way: waiting, then in a slot."""

    ticket: int
    """Unique in the engine, in the order of arrival."""
    request: Request
    seed: int
    limit: int
    """Tokens that may be sampled: its own maximum, or what the context leaves."""
    asked_at: float
    slot_at: float = 0.0
    cached: int = 0
    """Leading tokens whose keys and values are in the cache."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt_version: PolicyVersion | None = None
    """The version under which its prompt began to enter the cache."""
    spans: SpanRecorder | None = None
    prompt_key: bytes = b""

    @property
    def prompt(self) -> int:
        return len(self.request.prompt_ids_P)

    @property
    def pending(self) -> int:
        """Tokens that are not in the cache yet; one while decoding."""
        return self.prompt + len(self.tokens) - self.cached

    def token_ids(self, start: int, count: int) -> Ints:
        """Tokens `start` to `start + count`, prompt and sampled ones in one row."""
        end = start + count
        parts = (
            self.request.prompt_ids_P[start:end],
            self.tokens[max(0, start - self.prompt) : max(0, end - self.prompt)],
        )
        return np.concatenate(parts).astype(np.int64)

    def progress(self) -> Progress:
        """Any thread may ask: a token's version is noted before the token is there."""
        sampled = len(self.tokens)
        return Progress(sampled, self.spans.oldest if self.spans is not None else None)

    def complete(self, reason: FinishReason, now: float) -> Completion:
        """What its `generate` returns. `now` in seconds of the same clock as `asked_at`."""
        slot_at = self.slot_at or now
        return Completion(
            request_id=self.request.request_id,
            token_ids_N=np.array(self.tokens, np.int32),
            logprobs_N=np.array(self.logprobs, np.float32),
            spans=self.spans.close(len(self.tokens)) if self.spans is not None else (),
            finish_reason=reason,
            queue_s=slot_at - self.asked_at,
            decode_s=now - slot_at,
        )


@dataclass(frozen=True, slots=True)
class Copy:
    """The prompt's pages of slot `source` are copied to slot `target`: all but its last token, which is decoded."""

    source: int
    target: int
    count: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    copies: tuple[Copy, ...]
    """Done before the step; their targets decode in it."""
    decode: tuple[int, ...]
    """Slots with one new token each."""
    chunks: tuple[Chunk, ...]
    begins: tuple[int, ...]
    """Slots whose prompt begins to enter the cache in this step, by a copy or a chunk."""

    @property
    def empty(self) -> bool:
        return not self.decode and not self.chunks

    @property
    def phase(self) -> str:
        """What the step is in the books: "prefill" where nothing decodes, "mixed" where prompts ride along."""
        if not self.decode:
            return "prefill"
        return "mixed" if self.chunks else "decode"


def plan_step(slots: Listed[Sequence | None], version: PolicyVersion, budget: int) -> StepPlan:
    """What the next step computes: one token for each slot that decodes, and up to `budget` prompt tokens.

    Prompts are served in order of arrival. One that another slot holds under this version is copied; one that
    another slot is just prefilling under it waits for the copy. So a group's prompt is computed once.
    """
    copies, decode, chunks, begins = [], [], [], []
    prompts: dict[bytes, int] = {}
    """Prompts that are, or are just being, computed under this version, and where."""
    for slot, sequence in enumerate(slots):
        if sequence is not None and sequence.cached > 0 and sequence.prompt_version == version:
            prompts.setdefault(sequence.prompt_key, slot)
    occupied = [(sequence, slot) for slot, sequence in enumerate(slots) if sequence is not None]
    for sequence, slot in sorted(occupied, key=lambda pair: pair[0].ticket):
        source = prompts.get(sequence.prompt_key) if sequence.cached == 0 and sequence.prompt > 1 else None
        if source is not None:
            holder = slots[source]
            assert holder is not None
            if holder.cached >= sequence.prompt - 1:
                copies.append(Copy(source, slot, sequence.prompt - 1))
                begins.append(slot)
                decode.append(slot)
        elif sequence.pending == 1:
            decode.append(slot)
            if sequence.cached == 0:
                begins.append(slot)
        elif budget > 0:
            count = min(sequence.pending, budget)
            budget -= count
            chunks.append(Chunk(slot, sequence.cached, count))
            if sequence.cached == 0:
                begins.append(slot)
                prompts.setdefault(sequence.prompt_key, slot)
    return StepPlan(tuple(copies), tuple(sorted(decode)), tuple(chunks), tuple(begins))
