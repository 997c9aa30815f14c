"""Long prompts enter the cache in chunks, beside sequences that decode: the decode loop driven step by step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, LlamaForCausalLM

from headrace.telemetry.phases import Lane
from headrace.version import PolicyVersion
from producers.engines.api import Completion, Request, SamplingParams
from producers.engines.decode_loop import Abort, DecodeLoop, Finished, Submit, Swap, Swapped
from producers.engines.kv_pages import PAGE
from producers.engines.model_runner import ModelRunner
from producers.engines.pace import Pace
from producers.engines.sequences import Sequence
from tests.tiny import tiny_llama

FIRST, SECOND = PolicyVersion(1, 0), PolicyVersion(1, 1)
VOCABULARY = 96
CLOSE = 1e-3
BUDGET = 16


def made(seed: int) -> LlamaForCausalLM:
    return tiny_llama(seed, vocab_size=VOCABULARY, initializer_range=0.2)


@cache
def reference(seed: int) -> LlamaForCausalLM:
    return made(seed)


@dataclass
class Bench:
    """A decode loop without its thread, whose steps are watched."""

    slots: int = 4
    budget: int = BUDGET
    kv: str = "keep"
    context: int = 256
    done: dict[int, Completion] = field(default_factory=dict)
    chunks: list[int] = field(default_factory=list)
    """Tokens of prompts, of each step."""
    copied: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = made(0)
        self.runner = ModelRunner(self.model, self.slots, self.context)
        self.loop = DecodeLoop(
            self.runner,
            slots=self.slots,
            pace=Pace(self.budget, 3.0, self.runner.wide_context),
            recompute=self.kv == "recompute",
            report=self._report,
            lane=Lane("engine", "start"),
            decode=None,
        )
        forward, copy = self.runner.forward, self.runner.copy_prompt

        def watched(slots_B: Any, lengths_B: Any, chunks: Any, *rest: Any) -> torch.Tensor:
            self.chunks.append(sum(chunk.count for chunk in chunks))
            return forward(slots_B, lengths_B, chunks, *rest)

        def watched_copy(one: Any) -> None:
            self.copied.append(one.count)
            copy(one)

        self.runner.forward = watched  # type: ignore[method-assign]
        self.runner.copy_prompt = watched_copy  # type: ignore[method-assign]
        self.loop.send(Swap(FIRST, lambda: None))
        self.sequences: list[Sequence] = []

    def ask(self, prompt: list[int], new: int, seed: int = 0) -> Sequence:
        ids = np.array(prompt, np.int32)
        ticket = len(self.sequences)
        request = Request(f"r{ticket}", ids, SamplingParams(max_new_tokens=new))
        sequence = Sequence(ticket, request, seed, min(new, self.context - len(ids)), 0.0, prompt_key=ids.tobytes())
        self.sequences.append(sequence)
        self.loop.send(Submit(sequence))
        return sequence

    def swap(self) -> None:
        """Version SECOND, which is another model."""

        def apply() -> None:
            for mine, other in zip(self.model.parameters(), reference(1).parameters(), strict=True):
                mine.data.copy_(other.data)

        self.loop.send(Swap(SECOND, apply))

    def turns(self, count: int) -> None:
        for _ in range(count):
            self.loop.turn()

    def finish(self) -> None:
        for _ in range(3000):
            if len(self.done) == len(self.sequences):
                break
            self.loop.turn()
        assert len(self.done) == len(self.sequences), "some sequence never ends"
        assert self.runner.table.counts_S.sum() == 0, "pages are left behind"
        assert len(self.runner.table._free) == self.runner.table.pages

    def check(self, sequence: Sequence, seed: int = 0) -> None:
        """Log-probs are those of the whole sequence, computed at once."""
        done = self.done[sequence.ticket]
        expected = logprobs(seed, sequence.request.prompt_ids_P, done.token_ids_N)
        np.testing.assert_allclose(done.logprobs_N, expected, atol=CLOSE)

    def _report(self, events: list[Finished | Swapped]) -> None:
        self.done.update({event.ticket: event.completion for event in events if isinstance(event, Finished)})


@torch.inference_mode()
def logprobs(seed: int, prompt: np.ndarray, tokens: np.ndarray, cut: int = 0) -> np.ndarray:
    """What transformers says of `tokens`; with `cut`, the prompt's first tokens are of model 0, the rest of `seed`."""
    ids = torch.tensor([[*prompt.tolist(), *tokens.tolist()]])
    past = DynamicCache()
    if cut:
        reference(0)(ids[:, :cut], past_key_values=past)
    logits = reference(seed)(ids[:, cut:], past_key_values=past).logits[0, -len(tokens) - 1 : -1]
    return torch.log_softmax(logits, -1).gather(1, ids[0, -len(tokens) :, None])[:, 0].numpy()


def text(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCABULARY, length).tolist()


def test_a_running_sequence_waits_for_a_budget_of_another_prompt_and_no_more() -> None:
    bench = Bench()
    running = bench.ask(text(5), new=60)
    bench.turns(3)
    before = len(running.tokens)
    long = bench.ask(text(200, seed=1), new=4)
    for count in range(1, 14):
        bench.turns(1)
        assert len(running.tokens) == before + count, "each step has a token of it"
    assert bench.chunks[-13:] == [BUDGET] * 12 + [8]
    assert len(long.tokens) == 1
    bench.finish()
    bench.check(long)
    bench.check(running)


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    bench = Bench()
    bench.ask(text(5), new=100)
    bench.turns(2)
    long, short = bench.ask(text(200, seed=1), new=2), bench.ask(text(12, seed=2), new=2)
    bench.turns(3)
    assert len(short.tokens) >= 1
    assert 0 < long.cached < 60
    bench.finish()
    bench.check(long)
    bench.check(short)


def test_chunks_change_no_logprob() -> None:
    """The same requests in chunks and in one piece: the same tokens."""
    tokens = {}
    for budget in (7, BUDGET, 10_000):
        bench = Bench(budget=budget)
        asked = [bench.ask(text(150 + 9 * one, seed=one), new=12, seed=one) for one in range(4)]
        bench.finish()
        for sequence in asked:
            bench.check(sequence)
        tokens[budget] = [bench.done[one.ticket].token_ids_N.tolist() for one in asked]
        assert max(bench.chunks) == (budget if budget < 1000 else sum(150 + 9 * one for one in range(4)))
    assert tokens[7] == tokens[BUDGET] == tokens[10_000]


def test_a_group_waits_for_its_prompt_and_copies_it() -> None:
    bench = Bench()
    group = [bench.ask(text(100), new=6, seed=seed) for seed in range(3)]
    alone = bench.ask(text(9, seed=5), new=40)
    bench.finish()
    assert sum(bench.chunks) == 100 + 9
    assert bench.copied == [99, 99]
    for sequence in (*group, alone):
        bench.check(sequence)


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_a_commit_amid_a_prompt_is_seen_in_its_spans(kv: str) -> None:
    bench = Bench(kv=kv)
    long = bench.ask(text(100), new=8)
    twin = bench.ask(text(100), new=8, seed=1)
    bench.turns(3)
    assert long.cached == 3 * BUDGET
    bench.swap()
    bench.finish()
    first, second = bench.done[long.ticket], bench.done[twin.ticket]
    # The twin, of which nothing was computed yet, takes none of the old version's keys.
    assert second.spans == ((0, 8, SECOND, "fresh"),)
    bench.check(twin, seed=1)
    if kv == "keep":
        assert first.spans == ((0, 8, SECOND, "kept"),)
        expected = logprobs(1, long.request.prompt_ids_P, first.token_ids_N, cut=3 * BUDGET)
        np.testing.assert_allclose(first.logprobs_N, expected, atol=CLOSE)
        fresh = logprobs(1, long.request.prompt_ids_P, first.token_ids_N)
        assert np.abs(first.logprobs_N - fresh).max() > 20 * CLOSE, "the two models are too much alike to tell"
        assert bench.loop.stats().recomputed_tokens == 0
    else:
        assert first.spans == ((0, 8, SECOND, "fresh"),)
        bench.check(long, seed=1)
        assert bench.loop.stats().recomputed_tokens == 3 * BUDGET


def test_what_a_prompt_that_was_aborted_had_goes_to_its_twin() -> None:
    bench = Bench()
    other = bench.ask(text(6, seed=3), new=50)
    long, twin, third = (bench.ask(text(90), new=5, seed=seed) for seed in range(3))
    bench.turns(5)
    had = long.cached
    assert had > 2 * BUDGET
    bench.loop.send(Abort(long.ticket))
    bench.turns(1)
    aborted = bench.done[long.ticket]
    assert (aborted.finish_reason, len(aborted.token_ids_N), aborted.spans) == ("abort", 0, ())
    assert twin.cached >= had
    bench.finish()
    assert sum(bench.chunks) == 6 + 90
    for sequence in (other, twin, third):
        bench.check(sequence)


def test_a_prompt_outlives_a_sequence_of_one_token() -> None:
    """Each ends in the step in which its prompt is whole, when nobody has copied it yet."""
    bench = Bench()
    group = [bench.ask(text(70), new=1, seed=seed) for seed in range(4)]
    bench.finish()
    assert sum(bench.chunks) == 70
    for sequence in group:
        bench.check(sequence)
    # A twin that comes later has nothing to take, and neither has one under another version.
    late = bench.ask(text(70), new=1)
    bench.turns(2)
    bench.swap()
    other = bench.ask(text(70), new=1, seed=9)
    bench.finish()
    assert bench.done[late.ticket].spans == ((0, 1, SECOND, "kept"),)
    assert bench.done[other.ticket].spans == ((0, 1, SECOND, "fresh"),)
    bench.check(other, seed=1)


def test_keys_of_an_older_version_are_nobodys_to_take() -> None:
    bench = Bench()
    long, twin = bench.ask(text(90), new=5), bench.ask(text(90), new=5, seed=1)
    bench.turns(3)
    bench.swap()
    bench.loop.send(Abort(long.ticket))
    bench.finish()
    assert bench.done[twin.ticket].spans == ((0, 5, SECOND, "fresh"),)
    bench.check(twin, seed=1)


def test_what_was_recomputed_goes_to_a_twin_that_waits_for_it() -> None:
    bench = Bench(kv="recompute")
    long, twin = bench.ask(text(90), new=30), bench.ask(text(90), new=30, seed=1)
    bench.turns(10)
    sampled = len(twin.tokens)
    assert sampled > 1
    bench.swap()
    bench.turns(3)
    assert (long.cached, twin.cached) == (3 * BUDGET, 0)
    bench.loop.send(Abort(long.ticket))
    bench.finish()
    (_, _, old, _), (start, _, new, kv) = bench.done[twin.ticket].spans
    assert (old, start, new, kv) == (FIRST, sampled, SECOND, "fresh")
    done = bench.done[twin.ticket]
    expected = logprobs(1, twin.request.prompt_ids_P, done.token_ids_N)
    np.testing.assert_allclose(done.logprobs_N[sampled:], expected[sampled:], atol=CLOSE)


PROMPTS = st.sampled_from([1, 2, 15, 16, 17, PAGE, PAGE + 1, 100])


@st.composite
def arrivals(draw: st.DrawFn) -> Iterator[Any]:
    """(turns before it, prompt length, prompt's seed, new tokens, turns until it is aborted or None) of each."""
    one = st.tuples(st.integers(0, 6), PROMPTS, st.integers(0, 2), st.integers(1, 12), st.none() | st.integers(0, 8))
    return draw(st.lists(one, min_size=1, max_size=8))  # type: ignore[no-any-return]


def turn(bench: Bench, aborts: list[int]) -> None:
    """One step, if there is anything to do: whoever decodes gets a token, unless it is aborted."""
    for ticket in aborts:
        bench.loop.send(Abort(ticket))
    running = [one for one in bench.loop._slots if one is not None and one.pending == 1]
    counts = [len(one.tokens) for one in running]
    if bench.loop._waiting or bench.loop._occupied() or bench.loop._commands:
        bench.turns(1)
    for one, count in zip(running, counts, strict=True):
        assert one.ticket in aborts or len(one.tokens) == count + 1


@settings(max_examples=25, deadline=None)
@given(coming=arrivals(), budget=st.sampled_from([1, 7, BUDGET, 64]), slots=st.integers(1, 4))
def test_whatever_comes_when_every_logprob_is_right(coming: list[Any], budget: int, slots: int) -> None:
    bench, now = Bench(slots=slots, budget=budget), 0
    aborts: dict[int, list[int]] = {}
    for wait, length, seed, new, patience in coming:
        for _ in range(wait):
            turn(bench, aborts.pop(now, []))
            now += 1
        sequence = bench.ask(text(length, seed), new, seed=len(bench.sequences))
        if patience is not None:
            aborts.setdefault(now + patience, []).append(sequence.ticket)
    while aborts:
        turn(bench, aborts.pop(now, []))
        now += 1
    bench.finish()
    assert max(bench.chunks, default=0) <= budget
    for sequence in bench.sequences:
        done = bench.done[sequence.ticket]
        if len(done.token_ids_N):
            bench.check(sequence)
        assert done.finish_reason == "abort" or len(done.token_ids_N) == sequence.limit
