"""What the next step computes, decided without a model."""

from __future__ import annotations

from dataclasses import astuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.version import PolicyVersion
from producers.engines.api import Request, SamplingParams
from producers.engines.kv_pages import PAGE, PageTable
from producers.engines.pace import Budget
from producers.engines.seeds import request_seed
from producers.engines.sequences import Copy, Sequence, plan_step
from producers.engines.slot_attention import Chunk
from producers.engines.spans import SpanRecorder
from producers.engines.stops import completes_stop

V1, V2, V3 = PolicyVersion(1, 1), PolicyVersion(1, 2), PolicyVersion(1, 3)


def sequence(
    ticket: int, prompt: int | list[int], *, cached: int = 0, sampled: int = 0, version: PolicyVersion | None = None
) -> Sequence:
    ids = np.array(prompt if isinstance(prompt, list) else [ticket, *range(1, prompt)], np.int32)
    request = Request(f"r{ticket}", ids, SamplingParams(max_new_tokens=8))
    made = Sequence(ticket, request, seed=0, limit=8, asked_at=0.0, prompt_key=ids.tobytes())
    made.cached, made.prompt_version = cached, version
    made.tokens.extend(range(100, 100 + sampled))
    return made


def test_decoding_slots_decode_and_prompts_share_the_budget_in_order_of_arrival() -> None:
    slots = [sequence(7, 10), sequence(2, 6, cached=7, sampled=2, version=V1), None, sequence(3, 6)]
    plan = plan_step(slots, V1, Budget(8))
    assert plan.decode == (1,)
    assert plan.chunks == (Chunk(3, 0, 6), Chunk(0, 0, 2))
    assert plan.begins == (3, 0)
    assert plan_step([slots[0]], V1, Budget(0)).empty


def test_a_prompt_goes_on_where_it_was_cut() -> None:
    plan = plan_step([sequence(1, 10, cached=4, version=V1)], V1, Budget(5))
    assert plan.chunks == (Chunk(0, 4, 5),)
    assert plan.begins == ()
    # One token left is a decoding row: it sees all the others.
    assert plan_step([sequence(1, 10, cached=9, version=V1)], V1, Budget(5)).decode == (0,)


def test_one_of_a_group_is_prefilled_and_the_others_copy_it() -> None:
    prompt = [5, 6, 7, 8]
    group = [sequence(ticket, prompt) for ticket in range(3)]
    plan = plan_step(group, V1, Budget(100))
    assert (plan.copies, plan.decode, plan.chunks) == ((), (), (Chunk(0, 0, 4),))
    group[0].cached, group[0].prompt_version = 4, V1
    group[0].tokens.append(9)
    plan = plan_step(group, V1, Budget(100))
    assert plan.copies == (Copy(0, 1, 3), Copy(0, 2, 3))
    assert plan.decode == (0, 1, 2)
    assert plan.chunks == ()
    assert plan.begins == (1, 2)


def test_a_prompt_of_an_older_version_is_not_copied() -> None:
    prompt = [5, 6, 7, 8]
    old, new = sequence(0, prompt, cached=6, sampled=3, version=V1), sequence(1, prompt)
    plan = plan_step([old, new], V2, Budget(100))
    assert plan.copies == ()
    assert plan.chunks == (Chunk(1, 0, 4),)


def outdated(ticket: int, prompt: int | list[int], *, cached: int, sampled: int = 0) -> Sequence:
    """A sequence whose cache a commit has just emptied."""
    made = sequence(ticket, prompt, cached=cached, sampled=sampled, version=V1)
    made.outdate()
    return made


def test_an_emptied_cache_is_filled_within_the_budget_in_order_of_arrival() -> None:
    slots = [sequence(8, 5), outdated(2, 6, cached=8, sampled=3), outdated(3, 6, cached=9, sampled=4)]
    plan = plan_step(slots, V2, Budget(12))
    assert plan.chunks == (Chunk(1, 0, 9), Chunk(2, 0, 3))
    assert plan.begins == (1, 2)
    assert plan.decode == ()
    # The newest token of slot 1 was never in the cache: it is computed for the first time, and no prompt token.
    assert (plan.recomputed, plan.prefilled) == (8 + 3, 0)
    slots[1].cached, slots[2].cached = 9, 3
    slots[1].tokens.append(9)
    slots[1].prompt_version = slots[2].prompt_version = V2
    plan = plan_step(slots, V2, Budget(12))
    assert (plan.decode, plan.chunks, plan.begins) == ((1,), (Chunk(2, 3, 7), Chunk(0, 0, 5)), (0,))
    assert (plan.recomputed, plan.prefilled) == (6, 5)


def test_a_prompt_that_was_only_begun_counts_as_computed_again_up_to_there() -> None:
    one = outdated(1, 10, cached=6)
    plan = plan_step([one], V2, Budget(8))
    assert (plan.chunks, plan.recomputed, plan.prefilled) == ((Chunk(0, 0, 8),), 6, 2)
    one.cached = 4  # another commit comes before the recomputation is through
    one.outdate()
    assert plan_step([one], V2, Budget(8)).recomputed == 6
    assert plan_step([sequence(1, 10)], V2, Budget(8)).recomputed == 0


def test_a_groups_prompt_is_recomputed_once() -> None:
    prompt = [5, 6, 7, 8]
    first, second, third = (outdated(ticket, prompt, cached=6, sampled=3) for ticket in range(3))
    plan = plan_step([first, second, third], V2, Budget(100))
    assert (plan.copies, plan.chunks) == ((), (Chunk(0, 0, 7),))
    first.cached, first.prompt_version = 7, V2
    first.tokens.append(9)
    plan = plan_step([None, second, third, first], V2, Budget(6))
    assert plan.copies == (Copy(3, 1, 3), Copy(3, 2, 3))
    assert plan.chunks == (Chunk(1, 3, 4), Chunk(2, 3, 2))
    assert plan.begins == (1, 2)
    assert (plan.recomputed, plan.prefilled) == (3 + 2, 0)
    # Without budget for what follows it, a prompt is not copied.
    plan = plan_step([None, second, third, first], V2, Budget(4))
    assert (plan.copies, plan.chunks, plan.begins) == ((Copy(3, 1, 3),), (Chunk(1, 3, 4),), (1,))


def test_a_single_token_prompt_just_decodes() -> None:
    plan = plan_step([sequence(0, [3]), sequence(1, [3])], V1, Budget(100))
    assert (plan.decode, plan.chunks, plan.copies, plan.begins) == ((0, 1), (), (), (0, 1))


@settings(max_examples=200)
@given(st.data())
def test_every_occupied_slot_moves_or_waits_for_a_reason(data: st.DataObject) -> None:
    count, budget = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 12))
    slots: list[Sequence | None] = []
    for ticket in range(count):
        prompt = data.draw(st.sampled_from([[1, 2, 3], [4, 5, 6, 7], [8]]))
        cached = data.draw(st.integers(0, len(prompt)))
        sampled = data.draw(st.integers(1, 4)) if cached == len(prompt) else 0
        one = sequence(ticket, prompt, cached=cached + max(0, sampled - 1), sampled=sampled, version=V1)
        if data.draw(st.booleans()):
            one.outdate()
        slots.append(one)
    plan = plan_step(slots, V1, Budget(budget))
    moving = [*plan.decode, *(chunk.slot for chunk in plan.chunks)]
    assert len(moving) == len(set(moving))
    assert sum(chunk.count for chunk in plan.chunks) <= budget
    assert not plan.empty
    copied = {copy.target: copy.count for copy in plan.copies}
    assert set(copied) <= set(moving)
    for slot, start, new in [*((slot, None, 1) for slot in plan.decode), *map(astuple, plan.chunks)]:
        one = slots[slot]
        assert one is not None
        assert copied.get(slot, one.prompt - 1) == one.prompt - 1
        here = copied.get(slot, one.cached)
        assert start in (None, here)
        assert here + new <= one.prompt + len(one.tokens)
        assert start is not None or here + 1 == one.prompt + len(one.tokens)
    assert 0 <= plan.recomputed + plan.prefilled <= sum(chunk.count for chunk in plan.chunks)
    assert set(plan.begins) == {slot for slot in moving if slots[slot] and slots[slot].cached == 0}  # type: ignore[union-attr]


def test_a_sequence_gives_its_tokens_across_prompt_and_completion() -> None:
    one = sequence(9, [1, 2, 3], sampled=2)
    assert one.token_ids(0, 5).tolist() == [1, 2, 3, 100, 101]
    assert one.token_ids(2, 2).tolist() == [3, 100]
    assert one.token_ids(4, 1).tolist() == [101]


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2 * PAGE)), max_size=30))
def test_pages_belong_to_one_slot_and_come_lowest_first(steps: list[tuple[int, int]]) -> None:
    table, lengths = PageTable(4, 2 * PAGE), [0] * 4
    for slot, length in steps:
        if length < lengths[slot]:
            table.release(slot)
        table.grow(slot, length)
        lengths[slot] = length
        held = [int(page) for each in range(4) for page in table.held(each)]
        assert len(held) == len(set(held))
        assert [len(table.held(each)) for each in range(4)] == [-(-one // PAGE) for one in lengths]
    fresh = PageTable(2, 2 * PAGE)
    fresh.grow(0, 1)
    fresh.grow(1, PAGE + 1)
    fresh.release(0)
    fresh.grow(1, 2 * PAGE)
    fresh.grow(0, 1)
    assert (fresh.held(0).tolist(), fresh.held(1).tolist()) == ([0], [1, 2])


def test_spans_follow_the_versions() -> None:
    spans = SpanRecorder()
    assert spans.close(0) == ()
    assert spans.oldest is None
    for position, (version, cache) in enumerate([(V1, V1), (V1, V1), (V2, V1), (V3, V3)]):
        spans.note(position, version, cache)
    assert spans.oldest == V1
    assert spans.close(4) == ((0, 2, V1, "fresh"), (2, 3, V2, "kept"), (3, 4, V3, "fresh"))


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("abc", ("bc",), True),
        ("abc", ("ab",), True),
        ("abc", ("bd", ""), False),
        ("x" * 50 + "é!", ("é!",), True),
        ("x" * 50, ("x" * 40 + "y",), False),
        ("x" * 39 + "yy", ("x" * 38 + "yy",), True),
    ],
)
def test_stop_strings_are_found_where_the_newest_token_completes_them(
    text: str, stop: tuple[str, ...], expected: bool
) -> None:
    decode = lambda tokens: bytes(tokens).decode(errors="replace")  # noqa: E731 - a byte is a token
    assert completes_stop(list(text.encode()), stop, decode) is expected


def test_seeds_are_the_requests_own_or_follow_from_its_id() -> None:
    def seed(request_id: str, own: int | None, engine: int) -> int:
        return request_seed(Request(request_id, np.array([1], np.int32), SamplingParams(1, seed=own)), engine)

    assert seed("a", 3, 0) == seed("b", 3, 1)
    assert seed("a", None, 0) != seed("b", None, 0)
    assert seed("a", None, 0) != seed("a", None, 1)
    assert seed("a", None, 0) == seed("a", None, 0)
