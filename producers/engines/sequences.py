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
    """The version under which its prompt began to enter the cache, the last time that it did."""
    outdated: int = 0
    """Leading tokens that were in the cache when a commit emptied it."""
    spans: SpanRecorder = field(default_factory=SpanRecorder)
    prompt_key: bytes = b""

    @property
    def prompt(self) -> int:
        return len(self.request.prompt_ids_P)

    @property
    def pending(self) -> int:
        """Tokens that are not in the cache yet; one while decoding."""
        return self.prompt + len(self.tokens) - self.cached

    def outdate(self) -> None:
        """Its keys and values are to be computed anew, into the pages that it has."""
        self.outdated = max(self.outdated, self.cached)
        self.cached = 0

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
        return Progress(len(self.tokens), self.spans.oldest)

    def complete(self, reason: FinishReason, now: float) -> Completion:
        """What its `generate` returns. `now` in seconds of the same clock as `asked_at`."""
        slot_at = self.slot_at or now
        return Completion(
            request_id=self.request.request_id,
            token_ids_N=np.array(self.tokens, np.int32),
            logprobs_N=np.array(self.logprobs, np.float32),
            spans=self.spans.close(len(self.tokens)),
            finish_reason=reason,
            queue_s=slot_at - self.asked_at,
            decode_s=now - slot_at,
        )


@dataclass(frozen=True, slots=True)
class Copy:
    """The prompt's pages of slot `source` are copied to slot `target`: all but its last token, which is computed."""

    source: int
    target: int
    count: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    copies: tuple[Copy, ...]
    """Done before the step; their targets go on in it."""
    decode: tuple[int, ...]
    """Slots with one new token each."""
    chunks: tuple[Chunk, ...]
    begins: tuple[int, ...]
    """Slots whose prompt begins to enter the cache in this step, by a copy or a chunk."""
    prefilled: int
    """Prompt tokens of the chunks that were never in the cache."""
    recomputed: int
    """Tokens of the chunks that were, before a commit emptied it."""

    @property
    def empty(self) -> bool:
        return not self.decode and not self.chunks

    @property
    def phase(self) -> str:
        """What the step is in the books: "prefill" or "recompute" where nothing decodes, "mixed" where both are."""
        if self.decode:
            return "mixed" if self.chunks else "decode"
        return "recompute" if self.recomputed else "prefill"


def plan_step(slots: Listed[Sequence | None], version: PolicyVersion, budget: int) -> StepPlan:
    """What the next step computes: one token for each slot that decodes, and up to `budget` tokens of the others.

    Sequences are served in order of arrival, be it that their prompt is new or that a commit emptied their cache. A
    prompt that another slot holds under this version is copied; one that another slot is just computing under it waits
    for the copy. So a group's prompt is computed once.
    """
    copies, decode, chunks, begins = [], [], [], []
    prefilled = recomputed = 0
    prompts: dict[bytes, int] = {}
    """Prompts that are, or are just being, computed under this version, and where."""
    for slot, sequence in enumerate(slots):
        if sequence is not None and sequence.cached > 0 and sequence.prompt_version == version:
            prompts.setdefault(sequence.prompt_key, slot)
    occupied = [(sequence, slot) for slot, sequence in enumerate(slots) if sequence is not None]
    for sequence, slot in sorted(occupied, key=lambda pair: pair[0].ticket):
        start = sequence.cached
        source = prompts.get(sequence.prompt_key) if start == 0 and sequence.prompt > 1 else None
        if source is not None:
            holder = slots[source]
            assert holder is not None
            if holder.cached < sequence.prompt - 1:
                continue
            start = sequence.prompt - 1
        pending = sequence.pending + sequence.cached - start
        if pending == 1:
            decode.append(slot)
        elif budget > 0:
            chunk = Chunk(slot, start, min(pending, budget))
            budget -= chunk.count
            chunks.append(chunk)
            again = max(0, min(start + chunk.count, sequence.outdated) - start)
            recomputed += again
            prefilled += max(0, min(start + chunk.count, sequence.prompt) - start - again)
        else:
            continue
        if source is not None:
            copies.append(Copy(source, slot, start))
        if sequence.cached == 0:
            begins.append(slot)
            prompts.setdefault(sequence.prompt_key, slot)
    return StepPlan(
        tuple(copies), tuple(sorted(decode)), tuple(chunks), tuple(begins), prefilled=prefilled, recomputed=recomputed
    )
