"""What a model computes and moves, against figures that were worked out by hand for a tiny one."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from headrace.policy.intensity import shape_of
from headrace.telemetry.arithmetic import Shape, block_contexts, chunk_contexts
from producers.engines.effort import efforts
from producers.engines.slot_attention import Chunk

TINY = {
    "vocab_size": 10,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 2,
}
# One layer: queries and output 8 x 8 each, keys and values 8 x 4 each, three 8 x 12 of the gated MLP, two norms of 8.
LAYER = 2 * 64 + 2 * 32 + 3 * 96
NORMS = 2 * 2 * 8 + 8
LINEAR = 2 * LAYER + NORMS
"""Norms are so few that they count as weights."""
SHAPE = Shape(linear=LINEAR, head=80, parameters=LINEAR + 80, layers=2, query_width=8, kv_width=4)


@pytest.mark.parametrize("tied", [True, False])
def test_the_shape_of_a_model_is_read_from_it(tied: bool) -> None:
    model = LlamaForCausalLM(LlamaConfig(**TINY, tie_word_embeddings=tied))
    shape = shape_of(model)
    assert (shape.linear, shape.head, shape.layers) == (LINEAR, 80, 2)
    assert (shape.query_width, shape.kv_width) == (8, 4)
    assert shape.parameters == LINEAR + (80 if tied else 160)


def test_a_model_without_the_newer_fields_has_as_many_key_heads_as_query_heads() -> None:
    config = SimpleNamespace(num_attention_heads=4, hidden_size=8, vocab_size=10, num_hidden_layers=2)
    shape = Shape.of(config, parameters=1000, embedding=80)
    assert (shape.query_width, shape.kv_width, shape.linear) == (8, 8, 840)


def test_one_decoded_token_by_hand() -> None:
    # 2 x 1000 of the layers and norms, 4 x 2 layers x 8 x 5 positions of attention, 2 x 80 of the head.
    assert LINEAR == 1000
    assert SHAPE.forward_flop(1, 5, 1) == 2000 + 320 + 160
    assert SHAPE.forward_flop(1, 5, 0) == 2000 + 320
    # Keys and values, two layers, four values each of two bytes.
    assert SHAPE.kv_bytes(5, 2) == 5 * 2 * 2 * 4 * 2
    assert SHAPE.weight_bytes(2) == 2 * (1000 + 80)


def test_a_training_step_by_hand() -> None:
    # Three tokens see 1, 2 and 3 positions; two of them have logits.
    assert SHAPE.train_flop(3, chunk_contexts(0, 3), 2) == 3 * (6000 + 4 * 2 * 8 * 6 + 320)
    assert SHAPE.train_bytes(2) == 2 * 2 * 1080 + 8 * 1080
    assert SHAPE.adam_flop() == 12 * 1080
    assert SHAPE.adam_bytes() == 8 * 4 * 1080


@given(st.integers(0, 50), st.integers(0, 50), st.lists(st.integers(1, 20), max_size=4))
def test_contexts_are_those_of_counting(start: int, count: int, suffixes: list[int]) -> None:
    assert chunk_contexts(start, count) == sum(range(start + 1, start + count + 1))
    expected = sum(range(1, start + 1)) + sum(start + place for length in suffixes for place in range(1, length + 1))
    assert block_contexts(start, suffixes) == expected


def test_a_mixed_step_is_split_by_operations() -> None:
    prefill, decode = efforts(SHAPE, 2, [5, 7], [Chunk(0, 0, 3)], recomputed=0)
    assert (prefill.phase, decode.phase) == ("prefill", "decode")
    assert prefill.flop == SHAPE.forward_flop(3, 6, 1)
    assert decode.flop == SHAPE.forward_flop(2, 12, 2)
    # The weights are read once for both.
    assert prefill.nbytes + decode.nbytes == pytest.approx(SHAPE.weight_bytes(2) + SHAPE.kv_bytes(6 + 14, 2))


def test_a_chunk_that_was_in_the_cache_before_is_split_by_tokens() -> None:
    prefill, recompute = efforts(SHAPE, 2, [], [Chunk(0, 0, 8)], recomputed=6)
    assert (prefill.phase, recompute.phase) == ("prefill", "recompute")
    assert recompute.flop == pytest.approx(3 * prefill.flop)
    assert [one.phase for one in efforts(SHAPE, 2, [], [Chunk(0, 0, 8)], recomputed=8)] == ["recompute"]
    assert [one.phase for one in efforts(SHAPE, 2, [4], [], recomputed=0)] == ["decode"]
