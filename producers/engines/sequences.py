"""Sequences in decode slots, and what the next step computes: plain decisions without tensors."""

from __future__ import annotations

from collections.abc import Sequence as Listed
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from broker.messages import FinishReason
from headrace.version import PolicyVersion
from producers.engines.api import Completion, Progress, Request
from producers.engines.pace import Budget
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
    first_at: float = 0.0
    """When its first token was sampled."""
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
            first_token_s=max(0.0, self.first_at - self.asked_at),
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
    work: float = 0.0
    """What prompts add to the step, as `producers/engines/pace.py` counts it."""

    @property
    def empty(self) -> bool:
        return not self.decode and not self.chunks


@dataclass(frozen=True, slots=True, eq=False)
class _Want:
    """A sequence that could go on in this step, with `count` tokens after `start` cached ones."""

    sequence: Sequence
    slot: int
    start: int
    count: int
    source: int | None
    """The slot whose prompt is copied before, so that there are `start` tokens."""


def plan_step(
    slots: Listed[Sequence | None], version: PolicyVersion, budget: Budget, *, shortest_first: bool = False
) -> StepPlan:
    """What the next step computes: one token for each slot that decodes, and what `budget` allows of the others.

    Those are served in order of arrival, be it that their prompt is new or that a commit emptied their cache; or those
    first that need least. A prompt that another slot holds under this version is copied; one that another slot is just
    computing under it waits for the copy. So a group's prompt is computed once.
    """
    wants = _wants(slots, version)
    moving = []
    for want in wants:
        if want.count == 1 and (want.source is None or budget.fits(want.start)):
            moving.append(want)
            if want.source is not None:
                budget.copy(want.start)
    decode = sorted(want.slot for want in moving)
    chunks, prefilled, recomputed = [], 0, 0
    longer = [want for want in wants if want.count > 1]
    for want in sorted(longer, key=lambda want: want.count) if shortest_first else longer:
        count = budget.chunk(want.start, want.count)
        if not count:
            continue
        if want.source is not None:
            budget.copy(want.start)
        moving.append(want)
        chunks.append(Chunk(want.slot, want.start, count))
        end, sequence = want.start + count, want.sequence
        again = max(0, min(end, sequence.outdated) - want.start)
        recomputed += again
        prefilled += max(0, min(end, sequence.prompt) - want.start - again)
    return StepPlan(
        copies=tuple(Copy(want.source, want.slot, want.start) for want in moving if want.source is not None),
        decode=tuple(decode),
        chunks=tuple(chunks),
        begins=tuple(want.slot for want in moving if want.sequence.cached == 0),
        prefilled=prefilled,
        recomputed=recomputed,
        work=budget.spent,
    )


def _wants(slots: Listed[Sequence | None], version: PolicyVersion) -> list[_Want]:
    """Who could go on, in order of arrival; all but those that wait for a prompt that another slot computes."""
    occupied = sorted(
        ((sequence, slot) for slot, sequence in enumerate(slots) if sequence is not None),
        key=lambda pair: pair[0].ticket,
    )
    prompts: dict[bytes, int] = {}
    """Prompts that are, or are just being, computed under this version, and where."""
    for sequence, slot in occupied:
        if sequence.cached > 0 and sequence.prompt_version == version:
            holder = slots[prompts.setdefault(sequence.prompt_key, slot)]
            assert holder is not None
            if sequence.cached > holder.cached:
                prompts[sequence.prompt_key] = slot
    wants = []
    for sequence, slot in occupied:
        start, source = sequence.cached, None
        if start == 0 and sequence.prompt > 1:
            source = prompts.setdefault(sequence.prompt_key, slot)
            holder = slots[source]
            assert holder is not None
            if source == slot:
                source = None
            elif holder.cached < sequence.prompt - 1:
                continue
            else:
                start = sequence.prompt - 1
        wants.append(_Want(sequence, slot, start, sequence.pending + sequence.cached - start, source))
    return wants
